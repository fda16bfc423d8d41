"""Tasks of a partition key keep their order and their turns: with lost wake-ups, deadlocks, requeues and rollbacks."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy.orm import Session

import settings
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import Discard, NewTask, Permanent, submit, submit_many
from tasks.core.partition_keys import NEXT_SECONDS
from tasks.core.task import Task
from tasks.operations import dead_tasks
from tasks.recovery import lost_wakeups
from tasks.recovery.reclaim import Reclaimed, reclaim_leases
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks import deliveries
from tests.tasks.deliveries import change, claimed, claimed_in_turn, delivered, handled, leases, scalar
from tests.tasks.lost_workers import LEASE, later
from tests.tasks.wakeup_repair import repair_lost_wakeups
from tests.tasks.work import effects, insert, rows, task, transitions, wakeups

THEN: dict[int, Callable[[Task], None]] = {}  # by number of the task: what it does after its effect
RAN: list[int] = []
pytestmark = pytest.mark.usefixtures("known_handlers")


@pytest.fixture(autouse=True)
def turn_handler(ledger: ServersOfTests) -> Iterator[None]:
    THEN.clear()
    RAN.clear()
    with handled("test.turn", run, batch=10, backoff=[0]):
        yield


def run(each: Task, db: Session) -> None:
    insert(each, db)
    RAN.append(each.payload)
    if each.payload in THEN:
        THEN[each.payload](each)


def fails(error: Exception, *, times: int = 99) -> Callable[[Task], None]:
    left = [error] * times

    def fail(_task: Task) -> None:
        if left:
            raise left.pop()

    return fail


def keyed(count: int, *, key: str = "a", type: str = "test.turn", first: int = 0, **how: Any) -> list[uuid.UUID]:
    """Submit tasks of one partition key, numbered from `first`, and wait until their wake-ups are published."""
    with sessions().begin() as session:
        new = [NewTask(type, n, partition_key=key, **how) for n in range(first, first + count)]
        made = [each.task_id for each in submit_many(session, new)]
    assert after_commit_publisher().wait_until_idle(20)
    return made


def statuses(ids: list[uuid.UUID]) -> list[str]:
    return [task(id_)["status"] for id_ in ids]


def woken_since(last: int) -> set[uuid.UUID]:
    return {id_ for wakeup in wakeups(f"id > {last}") for id_ in wakeup.ids}


def last_wakeup() -> int:
    return max((wakeup.id for wakeup in wakeups()), default=0)


@pytest.mark.parametrize(("error", "final"), [(Discard("there"), "DISCARDED"), (Permanent("there"), "DEAD")], ids=str)
def test_a_verdict_based_on_a_rolled_back_effect_of_an_earlier_task_is_not_settled(
    error: Exception, final: str
) -> None:
    """The second task refuses because of a row of the first, and that row is rolled back together with the batch."""
    seen: list[int] = []

    def refuse_what_is_there(each: Task, db: Session) -> None:
        there = db.execute(sql("SELECT count(*) FROM public.test_sink")).scalar_one()
        seen.append(there)
        insert(each, db)
        if each.payload == 1 and there:
            raise error
        if each.payload == 0 and len(seen) > 1:  # when it runs alone
            raise Discard("changed its mind")

    with handled("test.turn", refuse_what_is_there, batch=10):
        first, second = keyed(2)
        delivered([first])
    assert statuses([first, second]) == ["DISCARDED", "SUCCEEDED"], f"{final} would rest on an uncommitted row"
    assert effects() == {second: 1}


def test_a_task_that_fails_behind_others_of_its_key_is_settled_after_them() -> None:
    THEN[2] = fails(RuntimeError("no"))
    ids = keyed(4)
    delivered(ids)
    assert statuses(ids) == ["SUCCEEDED", "SUCCEEDED", "RETRYING", "QUEUED"]
    assert task(ids[2])["attempt_count"] == 1
    ended = [scalar("SELECT max(id) FROM ledger.ingest_task_transition WHERE task_id = :id", id=id_) for id_ in ids]
    assert ended == sorted(ended), "settled in the order of the key"


def test_when_a_batch_loses_one_task_the_later_ones_of_its_key_are_released() -> None:
    ids = keyed(4)

    def lose_the_second(_task: Task) -> None:
        if task(ids[1])["status"] == "RUNNING":
            deliveries.take_away(ids[1])

    THEN[0] = lose_the_second
    delivered(ids)
    assert statuses(ids) == ["SUCCEEDED", "RUNNING", "QUEUED", "QUEUED"]
    assert set(effects()) == {ids[0]}
    assert {task(id_)["attempt_count"] for id_ in ids} == {0}


def test_a_wakeup_that_is_lost_after_a_long_wait_for_its_turn_is_noticed_after_a_grace(ledger: ServersOfTests) -> None:
    with handled("test.turn", run, batch=1):
        first, second = keyed(2)
        move(ledger, 7200)  # the first task takes two hours
        delivered([first])
    last = last_wakeup()
    move(ledger, 2 * settings.current().ingest_wakeup_grace_ms / 1000)
    assert repair_lost_wakeups() == 1
    assert woken_since(last) == {second}


def test_a_key_with_only_skipped_dead_tasks_does_not_hide_the_lost_wakeups_of_later_keys(
    ledger: ServersOfTests,
) -> None:
    with handled("test.turn", run, batch=1, skip_dead=True):
        THEN[0] = fails(Permanent("never"))
        delivered(keyed(1, key="a"))
        heads = {keyed(1, key=key, first=1)[0] for key in "bcde"}
        move(ledger, 3600)
        woken: set[uuid.UUID] = set()
        with pytest.MonkeyPatch.context() as small:
            small.setattr(lost_wakeups, "PAGE", 2)
            for _ in range(3):
                last = last_wakeup()
                repair_lost_wakeups()
                woken |= woken_since(last)
    assert woken == heads


def test_a_task_behind_a_long_running_one_is_woken_less_and_less_often(ledger: ServersOfTests) -> None:
    first, second = keyed(2)
    change(first, "status = 'RUNNING', lease_token = gen_random_uuid()")
    passed = 0.0
    for seconds in (0, NEXT_SECONDS, 60, 3600):
        move(ledger, seconds)
        passed += seconds
        last = last_wakeup()
        delivered([second])
        (wakeup,) = wakeups(f"id > {last}")
        assert wakeup.due_at is not None
        written_at = scalar("SELECT created_at FROM ledger.outbox_event WHERE id = :id", id=wakeup.id)
        waited = (written_at - task(second)["updated_at"]).total_seconds()
        assert waited >= passed
        assert (wakeup.due_at - written_at).total_seconds() == pytest.approx(max(NEXT_SECONDS, waited))


def test_a_task_submitted_while_its_predecessor_settles_is_not_forgotten(ledger: ServersOfTests) -> None:
    """The settling statement does not see it, and its own wake-up arrives before the predecessor has committed."""
    (first,) = keyed(1)
    claim = claimed_in_turn([first])
    with engine().connect() as settling:
        settling.execute(sql("UPDATE ledger.ingest_task SET status = 'SUCCEEDED', lease_token = NULL, finished_at ="
                              " ledger.ledger_now() WHERE id = :id"), {"id": first})  # fmt: skip
        (second,) = keyed(1, first=1)
        last = last_wakeup()
        delivered([second])
        settling.commit()
    assert woken_since(last) == {second}
    move(ledger, NEXT_SECONDS + 1)
    delivered([second])
    assert statuses([first, second]) == ["SUCCEEDED", "SUCCEEDED"]
    assert claim.tasks


def test_a_head_that_is_not_due_blocks_its_key_and_is_woken_at_its_time(ledger: ServersOfTests) -> None:
    with handled("test.turn", run, batch=1):
        (first,) = keyed(1, run_at=None)
        with sessions().begin() as session:
            run_at = scalar("SELECT ledger.ledger_now() + interval '1 hour'")
            second = submit(session, "test.turn", 1, partition_key="a", run_at=run_at).task_id
        (third,) = keyed(1, first=2)
        last = last_wakeup()
        delivered([third, second, first])
        (wakeup,) = wakeups(f"id > {last}")
        assert (wakeup.ids, wakeup.due_at) == ([second], run_at)
        delivered([third, second])
        assert statuses([first, second, third]) == ["SUCCEEDED", "QUEUED", "QUEUED"]
        move(ledger, 3601)
        delivered([third])
        delivered([second])
        delivered([third])
    assert RAN == [0, 1, 2]


def test_a_key_with_several_queues_types_and_priorities_stays_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGEST_QUEUES", "ingest,another")
    settings.current.cache_clear()
    with handled("test.other", run, batch=10, queue="another"):
        made = []
        for n in range(12):
            with sessions().begin() as session:
                type = ("test.turn", "test.other")[n // 2 % 2]
                made.append(submit(session, type, n, partition_key="a", priority=(3, 7)[n // 3 % 2]).task_id)
        for _ in range(12):
            delivered(list(reversed(made)))
    assert list(range(12)) == RAN
    assert set(effects().values()) == {1}


def test_skipped_tasks_keep_their_order_when_they_are_requeued() -> None:
    with handled("test.turn", run, batch=10, skip_dead=True):
        for n in range(8):
            THEN[n] = fails(Permanent("never"), times=2)
        with sessions().begin() as session:  # the ids of tasks with idempotency keys are not ordered
            new = [NewTask("test.turn", n, key=f"number {n}", partition_key="a") for n in range(8)]
            ids = [each.task_id for each in submit_many(session, new)]
        for _ in range(8):
            delivered(ids)
        assert set(statuses(ids)) == {"DEAD"}
        THEN.clear()
        list(dead_tasks.requeue(engine(), dead_tasks.Choice(ids=list(reversed(ids))), actor="me"))
        RAN.clear()
        delivered(ids)
    assert list(range(8)) == RAN


def test_a_key_stays_in_order_while_two_operators_requeue_and_discard_its_dead_tasks(ledger: ServersOfTests) -> None:
    with handled("test.turn", run, batch=2, backoff=[0]):
        for n in range(0, 40, 2):
            THEN[n] = fails(Permanent("never"), times=1)
        ids = keyed(40)
        stop = threading.Event()

        def operate(command: Any, odd: int) -> None:
            while not stop.is_set():
                chosen = [id_ for (id_, n) in rows("id, payload", "status = 'DEAD'") if n // 2 % 2 == odd]
                if chosen:
                    list(command(engine(), dead_tasks.Choice(ids=chosen), actor="me"))

        with ThreadPoolExecutor(3) as threads:
            working = [
                threads.submit(operate, dead_tasks.requeue, 0),
                threads.submit(operate, dead_tasks.discard, 1),
            ]
            try:
                for _ in range(400):
                    delivered(ids)
                    if not rows(where="status NOT IN ('SUCCEEDED', 'DISCARDED')"):
                        break
            finally:
                stop.set()
            for each in working:
                each.result()
    assert set(rows("status")) == {("SUCCEEDED",), ("DISCARDED",)}
    noted = [n for (n,) in rows("payload", "status = 'SUCCEEDED' ORDER BY finished_at, key_seq --")]
    assert noted == sorted(noted)
    assert set(effects().values()) == {1}


def test_the_tasks_of_a_lost_batch_with_keys_run_alone_and_in_order(ledger: ServersOfTests) -> None:
    ids, others = keyed(3), keyed(2, key="b", first=10)
    assert len(claimed_in_turn([ids[0], others[0]]).tasks) == 5
    later(ledger, LEASE + 1)
    assert reclaim_leases(engine(), settings.current()) == Reclaimed(leases=1, isolated=5)
    assert rows("status, attempt_count, isolated") == [("RETRYING", 0, True)] * 5
    for _ in range(3):
        delivered([*reversed(ids), *others])
    assert [n for n in RAN if n < 10] == [0, 1, 2]
    assert [n for n in RAN if n >= 10] == [10, 11]
    assert effects() == dict.fromkeys([*ids, *others], 1)
    assert leases() == 0
    assert all(("RUNNING", "RETRYING") in transitions(id_) for id_ in ids)


def test_a_task_that_is_dead_after_losing_its_worker_blocks_its_key_or_is_skipped(ledger: ServersOfTests) -> None:
    for skip, expected in ((False, "QUEUED"), (True, "SUCCEEDED")):
        with handled("test.turn", run, batch=1, skip_dead=skip):
            first, second = keyed(2, key=f"skip {skip}", max_attempts=1)
            claimed_in_turn([first])
            last = last_wakeup()
            later(ledger, LEASE + 1)
            assert reclaim_leases(engine(), settings.current()).charged == 1
            assert (second in woken_since(last)) is skip
            delivered([second])
            assert statuses([first, second]) == ["DEAD", expected]


def test_bulk_submits_with_both_kinds_of_keys_in_opposite_orders_never_deadlock() -> None:
    """Each submit has locked one key when it must wait; then each needs the key that the other has."""
    mine = [
        NewTask("test.turn", key, key=key, partition_key=part) for key, part in [("x", "p1"), ("m", "p2"), ("y", "p3")]
    ]
    yours = [
        NewTask("test.turn", key, key=key, partition_key=part) for key, part in [("y", "q1"), ("n", "q2"), ("x", "q3")]
    ]

    def submit_all(new: list[NewTask]) -> int:
        with sessions().begin() as session:
            return sum(each.created for each in submit_many(session, new))

    with engine().connect() as blocking, ThreadPoolExecutor(2) as threads:
        for key in ("m", "n"):
            submit(blocking, "test.turn", key, key=key)
        waiting = [threads.submit(submit_all, new) for new in (mine, yours)]
        while scalar("SELECT count(*) FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted") < 2:
            assert not any(each.done() for each in waiting)
        blocking.rollback()
        assert sorted(each.result(20) for each in waiting) == [1, 3]
    assert len(rows("id")) == 4


@pytest.mark.parametrize("at_once", [True, False])
def test_bulk_submits_to_overlapping_partition_keys_in_both_orders_never_deadlock(at_once: bool) -> None:
    names = [f"k{n}" for n in range(30)] + ["Z", "é", "a b", "_"]

    def submit_all(place: int) -> None:
        order = names if place % 2 else list(reversed(names))
        for n in range(5):
            with sessions().begin() as session:
                new = [NewTask("test.turn", [place, n, each], partition_key=name) for each, name in enumerate(order)]
                submit_many(session, new)
                if not at_once:
                    submit_many(session, [NewTask("test.turn", [place, n, 99], partition_key=order[0])] * 2)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(submit_all, range(4)))
    for name in names:
        found = [payload for (payload,) in rows("payload", "partition_key = :key ORDER BY key_seq --", key=name)]
        for place in range(4):
            mine = [(n, each) for by, n, each in found if by == place]
            assert mine == sorted(mine)


def test_the_order_of_a_key_is_the_order_of_commits_for_every_way_to_submit() -> None:
    """Four threads submit and roll back; each notes its number while it holds the lock of the key."""
    by_sql = sql("SELECT ledger.ingest_submit('test.turn', to_jsonb(CAST(:n AS integer)), partition_key => 'a')")
    committed: list[int] = []

    def submit_some(place: int) -> None:
        for round in range(12):
            n = place * 100 + round
            with sessions()() as session:
                if round % 4 == 3:
                    with session.begin_nested() as savepoint:
                        submit(session, "test.turn", -n, partition_key="a")
                        savepoint.rollback()
                if round % 3 == 0:
                    submit(session, "test.turn", n, partition_key="a")
                elif round % 3 == 1:
                    submit_many(session, [NewTask("test.turn", each, partition_key="a") for each in (n, n + 1000)])
                else:
                    session.execute(by_sql, {"n": n})
                if round % 5 == 4:
                    session.rollback()
                    continue
                committed.extend([n, n + 1000] if round % 3 == 1 else [n])
                session.commit()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(submit_some, range(4)))
    assert [n for (n,) in rows("payload", "true ORDER BY key_seq --")] == committed
    ids = [id_ for (id_,) in rows("id", "true ORDER BY key_seq --")]
    for _ in range(10):
        delivered(list(reversed(ids)))
    assert committed == RAN


def test_a_message_full_of_waiting_tasks_does_not_delay_the_head_of_another_key() -> None:
    ids, other = keyed(30), keyed(1, key="b", first=99)
    delivered([*ids[1:], *other])
    assert RAN == [99]
    assert claimed([ids[0]]).keyed == [ids[0]], "the claim without keys must leave it to the claim with keys"
