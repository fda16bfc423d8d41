"""Tasks that wait for a limit: each is woken when it may start, none is woken in vain for ever, none is in the way."""

from __future__ import annotations

import uuid
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy.orm import Session

import settings
from models.engine import engine
from models.sql import sql
from tasks.core.limits import limit_values
from tasks.core.registry import handlers
from tasks.execution.claim_statements import CLAIM
from tasks.execution.limit_statements import ADMIT, LOCK_FOR_CLAIM
from tasks.operations.discard import discard
from tasks.operations.task_details import read_details
from tasks.operations.why_waiting import QueueState, Reason, reasons
from tasks.recovery import limited_tasks
from tasks.recovery.prune import prune
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks import plans
from tests.tasks.deliveries import delivered, run_claim, scalar, statements, submitted
from tests.tasks.limited import (
    TYPE,
    admitted,
    admitted_in,
    follow_wakeups,
    for_tenant,
    ids_of,
    last_event,
    limited,
    new_wakeups,
    repaired,
    running,
    waiting,
    woken_ids,
)
from tests.tasks.lost_workers import reclaim_lost
from tests.tasks.wakeup_repair import repair_lost_wakeups
from tests.tasks.work import rows, transitions

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def why(id_: uuid.UUID) -> list[Reason]:
    with engine().connect() as connection:
        found = read_details(connection, id_)
    consumed = QueueState(0, frozenset({"w"}))
    return reasons(found, settings.current(), known_types=handlers(), read_queue=lambda _queue: consumed)


def test_all_tasks_run_although_each_wakeup_is_delivered_once_and_nothing_else_wakes_them(
    stack: ServersOfTests,
) -> None:
    ran: list[Any] = []
    with limited(lambda task: ran.append(task.payload["tenant"]), max_running=2, limit_by="tenant"):
        ids = [id_ for name in ("acme", "beta", "gamma") for id_ in for_tenant(name, 8)]
        seen = follow_wakeups(stack)
    assert Counter(ran) == {"acme": 8, "beta": 8, "gamma": 8}
    assert {len(transitions(id_)) for id_ in ids} == {3}
    assert len(seen) <= 2 * len(ids)


def test_the_tasks_of_a_rate_start_in_their_time_and_each_costs_one_wakeup(stack: ServersOfTests) -> None:
    with limited(rate="60/h"):
        submitted(20, TYPE)
        seen = follow_wakeups(stack)
        starts = sorted(at for (at,) in transitions_to_running())
    assert rows("status, attempt_count") == [("SUCCEEDED", 0)] * 20
    assert len(seen) <= 22
    assert all((later - start).total_seconds() > 59 for start, later in pairwise(starts))


def transitions_to_running() -> list[Any]:
    statement = "SELECT created_at FROM ledger.ingest_task_transition WHERE to_status = 'RUNNING'"
    with engine().begin() as connection:
        return list(connection.execute(sql(statement)))


def test_a_limit_that_is_used_up_causes_no_wakeups_and_no_search_however_often_its_tasks_are_delivered(
    stack: ServersOfTests,
) -> None:
    with limited(max_running=1):
        ids = submitted(50, TYPE)
        admitted(ids[:1])
        delivered(ids[1:])
        assert waiting() == 49
        move(stack, 3600)
        before, versions = last_event(), rows("xmin, id")
        for _ in range(5):
            delivered(ids[1:])
            assert repaired() == 0
            assert repair_lost_wakeups() == 0
        assert new_wakeups(before) == []
        assert rows("xmin, id") == versions  # nothing was written to the tasks either


def test_a_rate_that_is_used_up_has_one_wakeup_however_often_its_tasks_are_delivered() -> None:
    with limited(rate="10/d"):
        ids = submitted(50, TYPE)
        delivered(ids)
        for _ in range(5):
            delivered(ids)
            assert repaired() == 0
        (later,) = [each for each in new_wakeups(0) if each.due_at]
        assert len(later.ids) == 1
        assert (rows("status").count(("SUCCEEDED",)), waiting()) == (1, 49)


def test_free_places_are_filled_with_one_wakeup_each() -> None:
    with limited(max_running=5):
        ids = submitted(50, TYPE)
        before = last_event()
        assert len(admitted(ids).tasks) == 1
        assert sorted(len(each.ids) for each in new_wakeups(before)) == [1, 1, 1, 1]
        before = last_event()
        woken = woken_ids(0)[-4:]
        for id_ in woken:
            assert ids_of(admitted([id_])) == [id_]
        assert new_wakeups(before) == []
        assert running() == 5


def test_a_lost_wakeup_of_a_waiting_task_is_sent_again_and_each_time_later(stack: ServersOfTests) -> None:
    with limited(max_running=1):
        ids = submitted(3, TYPE)
        first = admitted(ids)
        move(stack, 3600)
        run_claim(first)  # its wake-up for the next task is lost
        assert repaired() == 0
        gaps = []
        for _ in range(3):
            seconds = 0
            while not repaired():
                move(stack, 5)
                seconds += 5
                assert seconds < 1000
            gaps.append(seconds)
        assert gaps[0] <= 15
        assert gaps[0] < gaps[1] < gaps[2]
        assert repaired(depth=7) == 0


def test_a_wakeup_that_may_wait_in_a_full_queue_is_not_sent_again(stack: ServersOfTests) -> None:
    with limited(max_running=1):
        ids = submitted(2, TYPE)
        run_claim(admitted(ids))
        move(stack, 60)
        assert repaired(depth=1000) == 0
        assert repaired(depth=0) == 1


def test_raising_a_limit_starts_more_of_the_waiting_tasks() -> None:
    with limited(max_running=1):
        ids = submitted(10, TYPE)
        admitted(ids)
        assert repaired() == 0
    with limited(max_running=4):
        assert repaired() == 3
        assert repaired() == 0


def test_removing_a_limit_lets_all_waiting_tasks_run(stack: ServersOfTests) -> None:
    with limited(max_running=1, limit_by="tenant"):
        ids = [*for_tenant("acme", 5), *for_tenant("beta", 5)]
        delivered(ids[:1])
        blocked = [admitted(ids) for _ in range(3)]
        assert waiting() == 7
    with limited():
        assert repaired() == 7
        assert waiting() == 0
        assert repaired() == 0
        for each in blocked:
            if each.tasks:
                run_claim(each)
        follow_wakeups(stack)
    assert rows("status") == [("SUCCEEDED",)] * 10


def test_discarding_the_task_that_would_have_been_woken_wakes_the_next_one() -> None:
    with limited(rate="10/d"):
        ids = submitted(3, TYPE)
        delivered(ids)
        (later,) = [each for each in new_wakeups(0) if each.due_at]
        before = last_event()
        discard(engine(), later.ids[0], actor="me")
        (instead,) = new_wakeups(before)
        assert instead.due_at is not None
        assert instead.ids != later.ids


def test_all_limits_with_waiting_tasks_are_looked_at_in_several_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_tasks, "PAGE", 2)
    with limited(max_running=1, limit_by="tenant"):
        ids = [id_ for number in range(5) for id_ in for_tenant(f"tenant {number}", 3)]
        for _ in range(5):
            admitted(ids)
        assert (running(), waiting()) == (5, 10)
    with limited(max_running=2, limit_by="tenant"):
        assert sum(repaired() for _ in range(3)) == 5


def test_a_tenant_with_a_hundred_thousand_waiting_tasks_slows_no_other() -> None:
    """The number of rows that claims read does not grow with them: of another tenant, its own, or of another type."""
    many = sql("""
        INSERT INTO ledger.ingest_task (id, type, payload, limit_key, limited_at, created_at, updated_at)
        SELECT CAST(lpad(to_hex(number), 32, '0') AS uuid), :type, '{"tenant": "acme"}', 'acme', at, at, at
        FROM generate_series(1, 100000) AS given(number), (SELECT ledger.ledger_now() AS at OFFSET 0) AS clock""")
    with limited(max_running=1, limit_by="tenant"):
        with engine().begin() as connection:
            connection.execute(many, {"type": TYPE})
            connection.execute(sql("ANALYZE ledger.ingest_task"))
        (other,), (own,), (plain,) = for_tenant("beta"), for_tenant("acme"), submitted(1)
        assert rows_read([other]) < 50
        assert rows_read([own]) < 50
        assert rows_read_by_claim([plain]) < 20
        delivered([other, plain])
        assert rows("status", "type <> :type OR limit_key <> 'acme'", type=TYPE) == [("SUCCEEDED",)] * 2
        with statements() as sent:
            assert repaired() == 1
        assert len(sent) < 20


def rows_read(ids: list[uuid.UUID]) -> int:
    """Return how many rows of tasks the statements read that admit these tasks."""
    limits = [each.limits for each in handlers().values() if each.limits]
    values: dict[str, Any] = {**limit_values(limits), "ids": [str(id_) for id_ in ids], "most": "{}", "batches": "{}"}
    values |= {"wakeup_holder": "me", "wakeup_token": str(uuid.uuid4()), "wakeup_seconds": 5, "wakeup_queues": "{}"}
    with engine().connect() as connection:
        (key,) = connection.execute(LOCK_FOR_CLAIM.text, values).all()
        read = plans.rows_read(connection, LOCK_FOR_CLAIM, values)
        read += plans.rows_read(connection, ADMIT, {**values, "key_types": [key.type], "limit_keys": [key.limit_key]})
        connection.rollback()
    return read


def rows_read_by_claim(ids: list[uuid.UUID]) -> int:
    known = {"types": "{test.insert}", "batches": "{10}", "relaxed": "{t}", "limited": "{f}"}
    given = {"ids": [str(id_) for id_ in ids], "token": str(uuid.uuid4()), "holder": "me", "lease_seconds": 60}
    with engine().connect() as connection:
        read = plans.rows_read(connection, CLAIM, {**known, **given})
        connection.rollback()
    return read


def test_why_names_the_limit_the_tenant_and_the_tasks_ahead() -> None:
    with limited(max_running=1, limit_by="tenant"):
        ids = for_tenant("acme", 3)
        for _ in range(2):
            admitted(ids)
        last = rows("id", "limited_at IS NOT NULL")[-1][0]
        (reason,) = why(last)
        assert reason.code == "over_limit"
        assert f"1 of 1 of {TYPE} for tenant=acme are running. 1 task waits before it." in reason.message


def test_why_names_the_rate_and_the_time_of_the_next_start() -> None:
    with limited(rate="10/d"):
        ids = submitted(3, TYPE)
        delivered(ids)
        first = next(each.ids[0] for each in new_wakeups(0) if each.due_at)
        limit, wakeup = why(first)
        assert f"10/d of {TYPE} may start. 0 tasks wait before it." in limit.message
        assert "will be published at" in wakeup.message


def test_a_limit_that_was_not_used_for_days_is_pruned(stack: ServersOfTests) -> None:
    with limited(rate="10/d", limit_by="tenant"):
        delivered(for_tenant("acme"))
        prune(engine(), settings.current())
        assert scalar("SELECT count(*) FROM ledger.task_limit") == 1
        move(stack, 49 * 3600)
        prune(engine(), settings.current())
        assert scalar("SELECT count(*) FROM ledger.task_limit") == 0


def test_raising_a_rate_starts_waiting_tasks_earlier() -> None:
    with limited(rate="1/d"):
        ids = submitted(5, TYPE)
        delivered(ids)
        assert repaired() == 0
    with limited(rate="60/h"):
        before = last_event()
        assert repaired() == 1
        (earlier,) = new_wakeups(before)
        assert earlier.due_at is not None
        assert (earlier.due_at - scalar("SELECT ledger.ledger_now()")).total_seconds() <= 60
        assert repaired() == 0


def test_a_limit_with_more_places_than_are_filled_at_once_is_filled_to_the_last(stack: ServersOfTests) -> None:
    with limited(lambda _tasks, _db: None, transactional=True, many=True, batch=20, max_running=1000):
        ids = submitted(1, TYPE)
        with engine().begin() as connection:
            connection.execute(
                sql("""
                INSERT INTO ledger.ingest_task (id, type, payload, limit_key, limited_at)
                SELECT gen_random_uuid(), :type, 'null', '', ledger.ledger_now() FROM generate_series(1, 250)"""),
                {"type": TYPE},
            )
        follow_wakeups(stack)
    assert Counter(rows("status", "id <> :one", one=ids[0])) == {("SUCCEEDED",): 250}


def test_a_process_that_does_not_know_the_limits_wakes_the_waiting_tasks_all_the_same(stack: ServersOfTests) -> None:
    with limited(max_running=1):
        ids = submitted(3, TYPE)
        (first,) = ids_of(admitted(ids))
    before = last_event()
    reclaim_lost(stack)
    assert set(woken_ids(before)) == set(ids)
    with limited(max_running=1):
        assert ids_of(admitted(ids)) != [first]  # it has waited for a shorter time than the others


def test_a_process_that_stops_in_the_middle_of_a_claim_does_not_keep_the_limit_for_ever() -> None:
    with limited(max_running=1):
        ids = submitted(1, TYPE)
        with Session(engine()) as db:
            admitted_in(db, ids)
            assert db.execute(sql("SHOW idle_in_transaction_session_timeout")).scalar_one() == "10s"
            db.commit()
            assert db.execute(sql("SHOW idle_in_transaction_session_timeout")).scalar_one() == "0"
