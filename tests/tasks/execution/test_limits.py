"""Limits: over all workers, never more tasks run or start than a handler allows."""

from __future__ import annotations

import os
import random
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.orm import Session

import settings
from models.engine import engine
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import Snooze
from tasks.core.outcomes import Permanent
from tasks.execution.claim import Claim
from tasks.execution.deliver import deliver
from tasks.operations.discard import discard
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import (
    counted,
    delivered,
    leases,
    run_claim,
    scalar,
    statements,
    submitted,
)
from tests.tasks.limited import (
    TYPE,
    admitted,
    admitted_in,
    follow_wakeups,
    for_tenant,
    ids_of,
    last_event,
    limited,
    running,
    waiting,
    woken_ids,
)
from tests.tasks.lost_workers import killed, reclaim_lost, start_child
from tests.tasks.work import OnPurpose, rows, task, transitions

WAITS_FOR_LIMIT = """SELECT count(*) FROM pg_locks WHERE NOT granted AND pid IN (
    SELECT pid FROM pg_locks WHERE relation = CAST('celeriac.task_limit' AS regclass) AND granted)"""
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def test_never_more_tasks_run_than_max_running_and_the_others_are_not_charged() -> None:
    with limited(max_running=3):
        ids = submitted(10, TYPE)
        claims = [admitted(ids) for _ in range(5)]
        assert [len(each.tasks) for each in claims] == [1, 1, 1, 0, 0]
        assert (running(), waiting(), leases()) == (3, 7, 3)
        assert set(rows("attempt_count")) == {(0,)}
        assert transitions(ids[-1]) == [(None, "QUEUED")]


def test_a_batch_handler_gets_at_most_the_free_places() -> None:
    with limited(lambda _tasks, _db: None, transactional=True, many=True, batch=100, max_running=7):
        ids = submitted(20, TYPE)
        first = admitted(ids)
        assert len(first.tasks) == 7
        run_claim(first)
        assert len(admitted(ids).tasks) == 7


def fails(_task: Any) -> None:
    raise OnPurpose


def dies(_task: Any) -> None:
    raise Permanent


def sleeps(_task: Any) -> None:
    raise Snooze(3600)


ENDS: dict[str, Callable[[ServersOfTests, uuid.UUID], object]] = {
    "discarded while it runs": lambda _, id_: discard(engine(), id_, actor="me"),
    "lost with its worker": lambda stack, _: reclaim_lost(stack),
}


@pytest.mark.parametrize("function", [lambda _task: None, fails, dies, sleeps], ids=["done", "retry", "dead", "snooze"])
def test_a_task_that_ends_wakes_the_next_one_whatever_its_outcome(function: Callable[..., Any]) -> None:
    with limited(function, max_running=1):
        ids = submitted(3, TYPE)
        first = admitted(ids)
        assert not admitted(ids).tasks
        before = last_event()
        run_claim(first)
        woken = set(woken_ids(before)) - set(ids_of(first))
        assert len(woken) == 1
        assert set(ids_of(admitted(list(woken)))) == woken
        assert running() == 1


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_place_of_a_task_that_was_taken_away_is_free(
    end: Callable[[ServersOfTests, uuid.UUID], object], stack: ServersOfTests
) -> None:
    with limited(max_running=1):
        ids = submitted(3, TYPE)
        (first,) = ids_of(admitted(ids))
        admitted(ids)
        before = last_event()
        end(stack, first)
        (woken,) = set(woken_ids(before)) - {first}
        assert ids_of(admitted([woken])) == [woken]


def test_a_worker_that_is_killed_while_its_tasks_run_leaves_no_place_occupied(stack: ServersOfTests) -> None:
    with limited(max_running=2):
        ids = submitted(3, TYPE)
        killed(ids, "ingest.after_claim=kill@2")
        killed(ids, "ingest.after_claim=kill@2")
        assert (running(), len(admitted(ids).tasks)) == (2, 0)
        reclaim_lost(stack)
        assert running() == 0
        follow_wakeups(stack)
        assert rows("status") == [("SUCCEEDED",)] * 3


def test_a_claim_whose_transaction_is_rolled_back_leaves_no_place_occupied_and_spends_no_token() -> None:
    with limited(max_running=1, rate="1/d"):
        ids = submitted(2, TYPE)
        with Session(engine()) as db:
            assert admitted_in(db, ids).tasks
        assert len(admitted(ids).tasks) == 1


def test_processes_that_deliver_the_same_tasks_at_once_never_exceed_the_limit(stack: ServersOfTests) -> None:
    """Every handler counts what runs, from its own connection. Four processes get all ids again and again."""
    note = sql("""INSERT INTO public.test_sink (task_id, note)
        SELECT :id, count(*) FROM ledger.ingest_task WHERE status = 'RUNNING'""")

    def count_running(task: Any) -> None:
        with engine().begin() as connection:
            connection.execute(note, {"id": task.id})

    with limited(count_running, max_running=2):
        ids = submitted(24, TYPE)

        def work() -> None:
            mine = list(ids)
            for turn in range(12):
                random.Random(os.getpid() + turn).shuffle(mine)
                deliver(engine(), mine[:8])

        assert after_commit_publisher().wait_until_idle(20)
        children = [start_child(work) for _ in range(4)]
        assert {os.waitpid(child, 0)[1] for child in children} == {0}
        follow_wakeups(stack)
    assert rows("status, attempt_count") == [("SUCCEEDED", 0)] * 24
    assert scalar("SELECT max(CAST(note AS integer)) FROM public.test_sink") <= 2
    assert scalar("SELECT count(*) FROM public.test_sink") == 24


@pytest.mark.parametrize("limit", [{"max_running": 1}, {"rate": "1/d"}], ids=["running", "rate"])
def test_of_two_claims_at_once_only_one_gets_the_last_place(limit: dict[str, Any]) -> None:
    """The second claim waits until the first has committed, and counts only then."""
    with limited(**limit):
        ids = submitted(2, TYPE)
        second: list[Claim] = []
        with Session(engine()) as claiming:
            assert admitted_in(claiming, ids[:1]).tasks
            other = threading.Thread(target=lambda: second.append(admitted(ids[1:])))
            other.start()
            wait_until(lambda: second or scalar(WAITS_FOR_LIMIT), "the second claim waits for the lock of the limit")
            claiming.commit()
            other.join(20)
        assert [each.tasks for each in second] == [[]]
        assert running() == 1


def test_a_place_that_becomes_free_while_a_claim_decides_is_not_forgotten() -> None:
    """The claim has counted the running task, which ends before the claim commits: one of the two wakes the next."""
    with limited(max_running=1):
        ids = submitted(2, TYPE)
        first = admitted(ids[:1])
        before = last_event()
        with Session(engine()) as claiming:
            assert not admitted_in(claiming, ids[1:]).tasks
            settling = threading.Thread(target=run_claim, args=[first])
            settling.start()
            wait_until(lambda: scalar(WAITS_FOR_LIMIT), "settling waits for the lock of the limit")
            claiming.commit()
            settling.join(20)
        assert woken_ids(before) == ids[1:]


def test_limits_hold_for_each_value_of_a_field_of_the_context_or_else_of_the_payload() -> None:
    with limited(max_running=1, limit_by="tenant"):
        ids = [
            *for_tenant("acme", 2),
            *for_tenant("beta"),
            *submitted(1, TYPE, {"tenant": "gamma"}, context={"tenant": "acme"}),
            *submitted(1, TYPE, {"tenant": "gamma"}),
            *submitted(1, TYPE, {"tenant": None}),
            *submitted(1, TYPE, [1, 2]),
        ]
        for _ in range(8):
            admitted(ids)
        found = rows("limit_key, status")
        assert sorted(key for key, status in found if status == "RUNNING") == ["", "acme", "beta", "gamma"]
        assert sorted(key for key, status in found if status == "QUEUED") == ["", "acme", "acme"]


def test_a_very_long_value_is_a_value_like_any_other() -> None:
    with limited(max_running=1, limit_by="tenant"):
        ids = for_tenant("é" * 100_000, 2) + for_tenant("é" * 99_999 + "e")
        assert [len(admitted(ids).tasks) for _ in range(3)] == [1, 1, 0]
        assert all(len(key) == 200 for (key,) in rows("limit_key"))


def test_the_rate_is_never_exceeded_by_more_than_the_burst(stack: ServersOfTests) -> None:
    with limited(rate="60/h"):
        ids = submitted(30, TYPE)
        assert [len(admitted(ids).tasks) for _ in range(3)] == [1, 0, 0]
        move(stack, 61)
        assert [len(admitted(ids).tasks) for _ in range(3)] == [1, 0, 0]
        move(stack, 3600)  # an idle hour saves up no more than the burst
        assert [len(admitted(ids).tasks) for _ in range(3)] == [1, 0, 0]


def test_one_claim_starts_as_many_tasks_as_the_rate_allows() -> None:
    with limited(lambda _task, _db: None, transactional=True, rate="20/s"):
        ids = submitted(100, TYPE)
        assert len(admitted(ids).tasks) == running() == 20


def test_a_retry_takes_a_token_of_the_rate_as_well() -> None:
    with limited(fails, rate="60/h", backoff=[0]):
        (id_,) = submitted(1, TYPE)
        delivered([id_])
        delivered([id_])
        assert (task(id_)["attempt_count"], task(id_)["limited_at"] is not None) == (1, True)


def test_tasks_start_in_the_order_of_priority_and_waiting() -> None:
    with limited(max_running=1):
        late = submitted(2, TYPE)
        (urgent,) = submitted(1, TYPE, priority=9)
        blocker = admitted(late[:1])
        admitted(late[1:])
        admitted([urgent])
        before = last_event()
        run_claim(blocker)
        assert woken_ids(before) == [urgent]
        assert not admitted(late[1:]).tasks  # the place is for the urgent one
        assert ids_of(admitted([urgent])) == [urgent]


def test_a_claim_takes_the_task_that_has_waited_longest_and_not_the_one_of_its_message() -> None:
    with limited(max_running=1):
        first, second, third = (submitted(1, TYPE) for _ in range(3))
        blocker = admitted(first)
        admitted(second)
        run_claim(blocker)
        assert ids_of(admitted(third)) == second
        assert waiting() == 1


def test_one_limit_holds_for_all_queues_of_a_type(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGEST_QUEUES", "ingest,bulk")
    settings.current.cache_clear()
    with limited(max_running=1):
        here, there = submitted(2, TYPE), submitted(2, TYPE, queue="bulk")
        assert [len(admitted(ids).tasks) for ids in (here, there)] == [1, 0]
        reclaim_lost(stack)
        follow_wakeups(stack)
        assert rows("status") == [("SUCCEEDED",)] * 4


def test_a_task_that_must_run_alone_waits_for_its_limit_and_runs_alone(stack: ServersOfTests) -> None:
    with limited(lambda _tasks, _db: None, transactional=True, many=True, batch=10, max_running=4):
        ids = submitted(6, TYPE)
        lost = admitted(ids)
        assert len(lost.tasks) == 4
        reclaim_lost(stack)
        assert sum(isolated for (isolated,) in rows("isolated")) == 4
        follow_wakeups(stack)
        assert rows("status") == [("SUCCEEDED",)] * 6


def test_tasks_of_one_partition_key_stay_in_order_under_a_limit(stack: ServersOfTests) -> None:
    ran: list[uuid.UUID] = []
    with limited(lambda task: ran.append(task.id), max_running=1):
        a, b = (submitted(4, TYPE, partition_key=key) for key in "ab")
        plain = submitted(2, TYPE)
        follow_wakeups(stack)
        assert [id_ for id_ in ran if id_ in a] == a
        assert [id_ for id_ in ran if id_ in b] == b
        assert len(ran) == len({*ran}) == 10
        assert rows("status", f"id = '{plain[0]}'") == [("SUCCEEDED",)]


def test_types_without_limits_send_the_statements_that_they_sent_before() -> None:
    with limited(max_running=1):
        ids = submitted(3)
        with statements() as sent:
            delivered(ids)
        assert not [each for each in sent if "task_limit" in each]
        assert len([each for each in sent if "EXECUTE" in each]) == 2  # claim and settle
        assert rows("limit_key, limited_at") == [(None, None)] * 3


def test_a_task_over_its_limit_counts_as_not_due() -> None:
    with limited(max_running=1):
        ids = submitted(3, TYPE)
        admitted(ids[:1])
        before = counted()
        delivered(ids[1:])
        assert (counted() - before) == {"not_due": 2}


def test_the_ledger_owns_the_tasks_that_wait() -> None:
    """Kafka's offset is committed when the tasks of a record are claimed or wait."""
    with limited(max_running=1):
        ids = submitted(3, TYPE)
        admitted(ids[:1])
        left: list[int] = []
        deliver(engine(), ids[1:], owned=lambda rest: left.append(len(rest)))
        assert left == [2, 0]  # the first claim finds out that there are limits


def test_a_type_that_has_no_limits_any_more_takes_tasks_that_wait_for_them() -> None:
    with limited(max_running=1):
        ids = submitted(3, TYPE)
        admitted(ids[:1])
        admitted(ids[1:])
    with limited():
        delivered(ids[1:])
    assert rows("status, limited_at", "status <> 'RUNNING'") == [("SUCCEEDED", None)] * 2
