"""The claim: every delivery may be a duplicate, and only one of them may run the task."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection

from models.engine import engine
from models.sql import sql
from tasks.core.registry import handlers
from tasks.execution.claim import Claim
from tests.outbox.ledger import move
from tests.outbox.table import pid
from tests.servers import ServersOfTests
from tests.tasks.deliveries import (
    at_commit,
    change,
    claimed,
    counted,
    delivered,
    handled,
    inserting,
    leases,
    scalar,
    submitted,
    take_away,
    wait_until_blocked,
)
from tests.tasks.work import effects, insert, rows, task, transitions, wakeups

CLOCK_IS_HELD = sql("LOCK TABLE ledger.ledger_clock IN ACCESS EXCLUSIVE MODE")
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


@pytest.fixture
def one() -> Iterator[Connection]:
    with engine().connect() as connection:
        yield connection


@pytest.fixture
def other() -> Iterator[Connection]:
    with engine().connect() as connection:
        yield connection


def ran(claim: Claim) -> set[uuid.UUID]:
    return {each.id for each in claim.tasks}


def test_a_claim_writes_its_lease_its_tasks_and_their_transitions_in_one_commit(one: Connection) -> None:
    ids = submitted(3)
    seen_elsewhere = []
    with at_commit(one, lambda _: seen_elsewhere.append((leases(), rows("status")))):
        claim = claimed(ids, connection=one, holder="me:1")
    assert seen_elsewhere == [(0, [("QUEUED",)] * 3)]
    assert ran(claim) == set(ids)
    assert rows("status, lease_token, attempt_count") == [("RUNNING", claim.token, 0)] * 3
    assert [transitions(id_, "from_status, to_status, attempt_count, actor")[-1] for id_ in ids] == [
        ("QUEUED", "RUNNING", 0, "me:1")
    ] * 3
    with engine().begin() as connection:
        (lease,) = connection.execute(sql("SELECT * FROM ledger.task_lease"))
    assert (lease.token, lease.holder, sorted(lease.task_ids)) == (claim.token, "me:1", sorted(ids))
    assert (lease.lease_until - lease.claimed_at).total_seconds() == 60
    assert (lease.type, lease.queue, lease.priority) == ("test.insert", "ingest", 5)


def test_every_claim_has_its_own_token() -> None:
    tokens = {claimed(submitted()).token for _ in range(10)}
    assert len(tokens) == 10


@pytest.mark.parametrize("later_one", [[0], [0, 1, 2], [2, 3, 4], [4, 3, 2, 1, 0]], ids=str)
def test_a_second_delivery_before_the_first_has_committed_is_skipped(
    one: Connection, other: Connection, later_one: list[int]
) -> None:
    ids = submitted(5)
    second: list[Claim] = []
    with at_commit(one, lambda _: second.append(claimed([ids[n] for n in later_one], connection=other))):
        first = claimed(ids[:3], connection=one)
    (late,) = second
    assert ran(first) >= set(ids[:3])
    assert not ran(first) & ran(late)
    assert set(late.skipped) >= set(ids[:3]) & {ids[n] for n in later_one}
    assert Counter(rows("status")) == {("RUNNING",): 5}  # the first claim filled its batch with the others


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_second_delivery_after_the_first_has_committed_is_skipped(
    one: Connection, other: Connection, order: str
) -> None:
    (id_,) = submitted()
    connections = {"a": one, "b": other}
    first, second = [claimed([id_], connection=connections[name]) for name in order]
    assert (ran(first), ran(second), second.skipped) == ({id_}, set(), [id_])
    assert len(transitions(id_)) == 2


def test_a_claim_with_an_old_snapshot_does_not_take_a_running_task(other: Connection, stack: Any) -> None:
    """Its snapshot shows the task as QUEUED; only the lock shows that it is RUNNING."""
    (id_,) = submitted()
    superuser = stack.cluster.superuser.connect()
    superuser.execute(CLOCK_IS_HELD)  # a claim reads the clock after it has taken its snapshot
    backend = pid(other)
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(claimed, [id_], connection=other)
        wait_until_blocked(backend)
        change(id_, f"status = 'RUNNING', lease_token = '{uuid.uuid4()}'")
        superuser.close()
        assert (late.result().tasks, late.result().skipped) == ([], [id_])
    assert leases() == 0
    assert len(transitions(id_)) == 1


def test_a_claim_with_an_old_snapshot_reads_the_current_values_of_a_task(other: Connection, stack: Any) -> None:
    (id_,) = submitted()
    superuser = stack.cluster.superuser.connect()
    superuser.execute(CLOCK_IS_HELD)
    backend = pid(other)
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(claimed, [id_], connection=other)
        wait_until_blocked(backend)
        change(id_, "status = 'RETRYING', next_retry_at = created_at, attempt_count = 3")
        superuser.close()
        assert [each.attempt_count for each in late.result().tasks] == [3]
    assert transitions(id_, "from_status, to_status, attempt_count")[-1] == ("RETRYING", "RUNNING", 3)


def test_a_delivery_while_the_handler_runs_does_not_run_the_task_again() -> None:
    ids: list[uuid.UUID] = []
    ids += inserting(dict.fromkeys(range(3), lambda *_: delivered(ids)), 3)
    delivered(ids)
    assert effects() == dict.fromkeys(ids, 1)


def test_tasks_that_are_delivered_many_times_at_once_run_once() -> None:
    ids = submitted(60)
    dice = random.Random(1)
    with ThreadPoolExecutor(8) as threads:
        for future in [threads.submit(delivered, dice.sample(ids, 30)) for _ in range(24)]:
            future.result()
    delivered(ids)
    assert effects() == dict.fromkeys(ids, 1)
    assert set(rows()) == {("SUCCEEDED", 0)}
    assert leases() == 0


def test_the_tasks_of_a_message_come_before_those_that_fill_the_batch() -> None:
    """If others displaced them, they would wait although their wake-up was consumed."""
    with handled("test.hundred", insert, batch=100):
        older = submitted(200, "test.hundred")
        own = submitted(40, "test.hundred")
        claim = claimed(own)
    assert ran(claim) >= set(own)
    assert len(claim.tasks) == 100
    assert len(ran(claim) & set(older)) == 60


def test_messages_delivered_once_and_in_any_order_leave_no_task_waiting() -> None:
    ids = submitted(260)
    dice = random.Random(2)
    dice.shuffle(ids)
    for start in range(0, len(ids), 7):
        delivered(ids[start : start + 7])
    assert effects() == dict.fromkeys(ids, 1)


def test_a_batch_is_filled_only_with_due_tasks_of_the_same_queue_and_type() -> None:
    wanted = submitted(3)
    submitted(2, "test.fail")
    later = submitted(1)
    change(later[0], "next_retry_at = ledger.ledger_now() + interval '1 hour'")
    alone = submitted(1)
    change(alone[0], "isolated = true")
    elsewhere = submitted(1)
    change(elsewhere[0], "queue = 'elsewhere'")
    done = submitted(1)
    change(done[0], "status = 'DEAD', finished_at = ledger.ledger_now()")
    assert ran(claimed(wanted[:1])) == set(wanted)


def test_a_batch_is_filled_with_the_tasks_that_wait_longest() -> None:
    with handled("test.hundred", insert, batch=100):
        ids = submitted(150, "test.hundred")
        change(ids[140], "next_retry_at = created_at - interval '1 hour'")
        for id_ in ids[:100]:
            change(id_, "next_retry_at = created_at")
        assert ran(claimed([ids[0]])) == {ids[0], ids[140], *ids[100:140], *ids[141:], *ids[1:50]}


def test_a_batch_is_never_larger_than_its_handler_says() -> None:
    with handled("test.three", insert, batch=3):
        ids = submitted(10, "test.three")
        claim = claimed(ids)
        assert ran(claim) == set(ids[:3])
        assert claim.left == ids[3:]
        assert len(claimed(ids[3:4]).tasks) == 3
        delivered(claim.left)
    assert Counter(rows("status")) == {("RUNNING",): 6, ("SUCCEEDED",): 4}


def test_a_claim_that_gets_none_of_its_own_tasks_takes_no_others() -> None:
    (mine, *_) = submitted(5)
    change(mine, "next_retry_at = ledger.ledger_now() + interval '1 hour'")
    claim = claimed([mine, uuid.uuid4()])
    assert (claim.tasks, claim.not_due) == ([], [mine])
    assert leases() == 0


def test_a_claim_reports_why_it_did_not_take_each_id(other: Connection) -> None:
    due, later, running, locked, done, dead, unknown_type = submitted(7)
    unknown = uuid.uuid4()
    claimed([running], handlers={"test.insert": handlers()["test.insert"]})  # its batch has the others, too
    for id_ in (due, later, locked, done, dead, unknown_type):
        change(id_, "status = 'QUEUED', lease_token = NULL")
    change(later, "next_retry_at = ledger.ledger_now() + interval '1 hour'")
    change(done, "status = 'SUCCEEDED', finished_at = ledger.ledger_now()")
    change(dead, "status = 'DEAD', finished_at = ledger.ledger_now()")
    change(unknown_type, "type = 'unknown.type'")
    other.execute(sql("SELECT FROM ledger.ingest_task WHERE id = :id FOR UPDATE"), {"id": locked})
    claim = claimed([due, later, running, locked, done, dead, unknown_type, unknown, due])
    assert ran(claim) == {due}
    assert set(claim.skipped) == {running, locked, done, dead, unknown}
    assert (claim.not_due, claim.unhandled, claim.left) == ([later], [unknown_type], [])


def test_a_task_named_twice_in_one_message_runs_once() -> None:
    (id_,) = submitted()
    delivered([id_, str(id_), str(id_).upper(), id_])
    assert effects() == {id_: 1}


def test_values_that_are_not_ids_are_skipped_and_the_rest_of_the_message_runs() -> None:
    (id_,) = submitted()
    before = counted()
    garbage: list[Any] = ["", "x", None, 17, -1.5, [], {"a": 1}, "\ud800", "\x00", "0" * 31, b"0" * 32, "'; DROP"]
    delivered([*garbage, id_, str(uuid.uuid4())])
    assert effects() == {id_: 1}
    assert counted() - before == {"skipped": len(garbage) + 1, "succeeded": 1}


def test_a_message_with_several_types_runs_each_with_its_own_handler() -> None:
    first, second = submitted(2), submitted(2, "test.many")
    change(submitted(1, "test.many")[0], "queue = 'elsewhere'")
    delivered([first[0], second[0], first[1], second[1]])
    assert effects() == dict.fromkeys([*first, *second], 1)
    assert Counter(rows("status")) == {("SUCCEEDED",): 4, ("QUEUED",): 1}


def test_a_message_with_several_priorities_is_claimed_by_priority() -> None:
    """Lost wake-ups are found by priority."""
    usual, urgent = submitted(2), submitted(2, priority=9)
    claim = claimed([usual[0], urgent[0]])
    assert usual[0] in ran(claim)
    assert urgent[0] in claim.left
    assert scalar("SELECT priority FROM ledger.task_lease") == 5


def test_an_isolated_task_runs_alone_and_after_the_others_of_its_message() -> None:
    ids = submitted(4)
    change(ids[1], "isolated = true")
    claim = claimed(ids)
    assert ran(claim) == {ids[0], ids[2], ids[3]}
    assert claim.left == [ids[1]]
    submitted(5)
    assert ran(claimed(claim.left)) == {ids[1]}


def test_isolated_tasks_of_one_message_run_one_after_the_other() -> None:
    at_once: list[int] = []
    ids = inserting(dict.fromkeys(range(3), lambda *_: at_once.append(leases())), 3)
    for id_ in ids:
        change(id_, "isolated = true")
    delivered(ids)
    assert effects() == dict.fromkeys(ids, 1)
    assert at_once == [1, 1, 1]
    assert {len(transitions(id_)) for id_ in ids} == {3}


def test_a_task_does_not_run_before_its_due_time(ledger: ServersOfTests) -> None:
    (id_,) = submitted()
    change(id_, "status = 'RETRYING', next_retry_at = ledger.ledger_now() + interval '1 hour'")
    before = counted()
    delivered([id_])
    assert (rows("status"), counted() - before) == ([("RETRYING",)], {"not_due": 1})
    move(ledger, 3600)
    delivered([id_])
    assert rows("status") == [("SUCCEEDED",)]


def test_a_task_without_a_handler_here_is_woken_again_later_and_not_charged(ledger: ServersOfTests) -> None:
    """During a rolling deployment another worker may have the handler."""
    (id_,) = submitted()
    change(id_, "type = 'of.tomorrow'")
    delivered([id_])
    found = task(id_)
    assert (found["status"], found["attempt_count"]) == ("QUEUED", 0)
    assert len(transitions(id_)) == 1
    assert (wakeups()[-1].ids, wakeups()[-1].due_at) == ([id_], found["last_wakeup_at"])
    with handled("of.tomorrow", insert):
        delivered([id_])
    assert effects() == {id_: 1}


@pytest.mark.parametrize(("transactional", "expected"), [(True, "off"), (False, "on")], ids=str)
def test_only_the_claim_of_a_transactional_handler_is_committed_asynchronously(
    transactional: bool, expected: str
) -> None:
    """An effect outside the ledger must not survive a crash that loses its claim."""
    shown: list[str] = []

    def show(connection: Connection) -> None:
        shown.append(connection.exec_driver_sql("SHOW synchronous_commit").scalar_one())

    arguments: Any = (lambda _task, _db: None) if transactional else (lambda _task: None)
    with handled("test.durable", arguments, transactional=transactional):
        first, second = submitted(2, "test.durable")
        with engine().connect() as connection, at_commit(connection, show):
            claimed([first], connection=connection)
        assert shown == [expected]
        shown.clear()
        change(second, "status = 'QUEUED', lease_token = NULL")  # the claim had taken it, too
        with at_commit(engine(), show):
            delivered([second])
    assert set(shown) == {"on"}
    assert task(second)["status"] == "SUCCEEDED"
    with engine().connect() as one, engine().connect() as another:
        for connection in (one, another):
            assert connection.exec_driver_sql("SHOW synchronous_commit").scalar_one() == "on"


def test_a_task_whose_lease_was_reclaimed_can_be_claimed_again() -> None:
    (id_,) = submitted()
    claimed([id_])
    take_away(id_)
    assert claimed([id_]).skipped == [id_]
    change(id_, "status = 'RETRYING', lease_token = NULL, next_retry_at = created_at")
    assert ran(claimed([id_])) == {id_}
