"""Idempotency keys: one task per key, whichever way and however concurrently it is submitted."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import settings
from models.engine import engine, sessions
from models.errors import LedgerBusy
from models.sql import sql
from tasks import IdempotencyConflict, NewTask, submit, submit_many
from tasks.core.task_ids import keyed_id
from tasks.recovery.prune import PRUNE_DONE, prune
from tasks.submission import submit as submit_module
from tests.outbox.ledger import move
from tests.outbox.table import WAITING, pid
from tests.servers import ServersOfTests, wait_until
from tests.tasks import work
from tests.tasks.work import rows, task, transitions, wakeups

pytestmark = pytest.mark.usefixtures("stack")
Lane = Callable[[Connection, Any, str | None], uuid.UUID]
BY_SQL = sql("SELECT ledger.ingest_submit('test.insert', CAST(:payload AS jsonb), :key)")
PRUNE_AT_ONCE = {"hours": 1, "batch": 100}


def by_submit(connection: Connection, payload: Any, key: str | None) -> uuid.UUID:
    return submit(connection, "test.insert", payload, key=key).task_id


def by_submit_many(connection: Connection, payload: Any, key: str | None) -> uuid.UUID:
    """Submit it with a task of another type, because a single task takes the same path as `submit`."""
    return submit_many(connection, [NewTask("test.fail"), NewTask("test.insert", payload, key=key)])[1].task_id


def by_sql(connection: Connection, payload: Any, key: str | None) -> uuid.UUID:
    """Submit it in a savepoint, because an error in SQL ends the transaction."""
    try:
        with connection.begin_nested():
            found = connection.execute(BY_SQL, {"payload": json.dumps(payload), "key": key}).scalar_one()
    except DBAPIError as error:
        if error.orig.pgcode != "CL409":  # type: ignore[union-attr]
            raise
        id_ = str(error.orig).split("The key belongs to the task ")[1][:36]
        raise IdempotencyConflict(uuid.UUID(id_)) from None
    return uuid.UUID(str(found))


LANES: list[Lane] = [by_submit, by_submit_many, by_sql]
each_lane = pytest.mark.parametrize("lane", LANES)
each_pair = pytest.mark.parametrize(("lane", "then"), [(one, other) for one in LANES for other in LANES])


@dataclass(frozen=True, slots=True)
class Second:
    """A second client that submits while the transaction of the first is open."""

    stack: ServersOfTests
    connection: Connection
    threads: ThreadPoolExecutor
    submits: list[Future[uuid.UUID | None]] = field(default_factory=list)

    def waits(self, lane: Lane, payload: Any, key: str) -> Future[uuid.UUID | None]:
        """Submit in a thread and return when it waits for a lock. The result is the task of a conflict, or None."""
        self.submits.append(started := self.threads.submit(self._submit, lane, payload, key))
        wait_until(self._is_blocked, "the second client waits for the first")
        return started

    def _submit(self, lane: Lane, payload: Any, key: str) -> uuid.UUID | None:
        with self.connection.begin():
            return conflict_of(lane, self.connection, payload, key)

    def _is_blocked(self) -> bool:
        with self.stack.cluster.superuser.connect() as watcher:
            return bool(watcher.execute(WAITING, {"pids": [pid(self.connection)]}).scalar_one())


@pytest.fixture
def second(stack: ServersOfTests) -> Iterator[Second]:
    with engine().connect() as connection, ThreadPoolExecutor(1) as threads:
        yield (made := Second(stack, connection, threads))
        if not all(submit.done() for submit in made.submits):  # a failed test left it waiting
            with stack.cluster.superuser.begin() as other:
                other.execute(sql("SELECT pg_cancel_backend(:pid)"), {"pid": pid(connection)})


def conflict_of(lane: Lane, connection: Connection, payload: Any, key: str) -> uuid.UUID | None:
    """Submit, and return the task that the key belongs to if there is a conflict, otherwise None."""
    try:
        lane(connection, payload, key)
    except IdempotencyConflict as conflict:
        return conflict.task_id
    return None


def keyed(columns: str = "id") -> list[tuple[Any, ...]]:
    return rows(columns, "idempotency_key IS NOT NULL")


def wakeups_of(task_id: uuid.UUID) -> int:
    return sum(wakeup.ids.count(task_id) for wakeup in wakeups())


def finish_all() -> None:
    """Update all tasks as if they had succeeded a year ago."""
    with engine().begin() as connection:
        connection.execute(
            sql(
                "UPDATE ledger.ingest_task"
                " SET status = 'SUCCEEDED', finished_at = ledger.ledger_now() - interval '1 year'"
            )
        )


def test_all_ways_of_submitting_write_the_same_rows() -> None:
    written = []
    for lane in LANES:
        with engine().begin() as connection:
            id_ = lane(connection, {"n": [1, None, "é"]}, f"by {lane.__name__}")
        row = task(id_)
        for own in ("id", "idempotency_key", "created_at", "updated_at", "last_wakeup_at"):
            del row[own]
        (wakeup,) = [wakeup for wakeup in wakeups() if id_ in wakeup.ids]
        history = transitions(id_, "from_status, to_status, attempt_count, message")
        written.append(
            (row, history, wakeup.queue, wakeup.type, wakeup.batch, wakeup.priority, wakeup.due_at, wakeup.status)
        )
        assert wakeup.ids == [id_]
    assert written[0] == written[1] == written[2]


@each_pair
def test_a_key_that_is_submitted_in_two_ways_has_one_task(lane: Lane, then: Lane, connection: Connection) -> None:
    (id_,) = {each(connection, {"n": 1}, "k") for each in (lane, then, lane)}
    assert id_ == keyed_id("test.insert", "k")
    assert conflict_of(then, connection, {"n": 2}, "k") == id_
    connection.commit()
    assert keyed("payload") == [({"n": 1},)]
    assert wakeups_of(id_) == len(transitions(id_)) == 1


@each_pair
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_two_open_transactions_with_one_key_create_one_task(
    lane: Lane, then: Lane, ending: str, connection: Connection, second: Second
) -> None:
    lane(connection, {"n": 1}, "k")
    same = second.waits(then, {"n": 1}, "k")
    getattr(connection, ending)()
    assert same.result(20) is None
    assert keyed() == [(keyed_id("test.insert", "k"),)]
    assert wakeups_of(*keyed()[0]) == len(transitions(*keyed()[0])) == 1


@each_pair
def test_a_conflict_is_not_missed_by_a_transaction_that_waited(
    lane: Lane, then: Lane, connection: Connection, second: Second
) -> None:
    lane(connection, {"n": 1}, "k")
    conflict = second.waits(then, {"n": 2}, "k")
    connection.commit()
    assert conflict.result(20) == keyed_id("test.insert", "k")
    lane(connection, {"n": 1}, "l")
    free = second.waits(then, {"n": 2}, "l")
    connection.rollback()
    assert free.result(20) is None
    assert keyed("idempotency_key, payload") == [("k", {"n": 1}), ("l", {"n": 2})]


def test_concurrent_submits_of_one_key_create_one_task_although_some_roll_back() -> None:
    barrier = Barrier(6, timeout=20)

    def race(number: int, key: str) -> uuid.UUID | None:
        with engine().connect() as own:
            barrier.wait()
            found = LANES[number % 3](own, {"n": 1}, key)
            if number < 2:
                own.rollback()
                return None
            own.commit()
            return found

    with ThreadPoolExecutor(6) as threads:
        for round_ in range(15):
            key = f"round {round_}"
            found = set(threads.map(race, range(6), [key] * 6))
            assert found == {None, keyed_id("test.insert", key)}
    assert len(keyed()) == 15
    assert all(wakeups_of(id_) == len(transitions(id_)) == 1 for (id_,) in keyed())


SAME = [
    ("1", "1.0"),
    ("[0.5]", "[0.50]"),
    ("100", "1e2"),
    ('{"a": 1, "b": 2}', '{"b": 2.000, "a": 1}'),
    ('{"a": 2}', '{"a": 1, "a": 2}'),
    ('"\\u00e9"', '"é"'),
    ('{"x.0": "1.0 \\" 2.0", "y": -0.0}', '{"y": 0, "x.0": "1.0 \\" 2.0"}'),
]
DIFFERENT = [
    ("1", '"1"'),
    ("null", "{}"),
    ("[1, 2]", "[2, 1]"),
    ('"1.0"', '"1"'),
    ('"é"', '"e\\u0301"'),
    ('{"a": null}', "{}"),
    ("0.5", "0.05"),
    ("10", "1"),
    ('"a\\\\"', '"a"'),
]


@each_lane
@pytest.mark.parametrize("pruned", [False, True], ids=["waiting", "pruned"])
def test_payloads_are_compared_as_jsonb_even_after_the_task_was_pruned(
    lane: Lane, pruned: bool, connection: Connection
) -> None:
    for number, (stored, _) in enumerate(SAME + DIFFERENT):
        connection.execute(BY_SQL, {"payload": stored, "key": str(number)})
    connection.commit()
    if pruned:
        finish_all()
        assert prune(engine(), settings.current()).tasks == len(SAME + DIFFERENT)
    for number, (_, again) in enumerate(SAME + DIFFERENT):
        conflict = conflict_of(lane, connection, json.loads(again), str(number))
        assert (conflict is None) == (number < len(SAME)), again
    connection.commit()
    assert len(keyed()) == (0 if pruned else len(SAME + DIFFERENT))


@each_lane
def test_a_pruned_task_does_not_run_again(lane: Lane, connection: Connection) -> None:
    id_ = lane(connection, {"n": 1}, "k")
    connection.commit()
    finish_all()
    prune(engine(), settings.current())
    assert lane(connection, {"n": 1}, "k") == id_
    assert conflict_of(lane, connection, {"n": 2}, "k") == id_
    connection.commit()
    assert keyed() == transitions(id_) == []
    assert wakeups_of(id_) == 1  # the old wake-up
    found = submit(connection, "test.insert", {"n": 1}, key="k")
    assert (found.status, found.created) == ("SUCCEEDED", False)


@each_lane
def test_a_key_that_is_pruned_during_its_submit_does_not_run_again(
    lane: Lane, connection: Connection, second: Second
) -> None:
    """The submit waits for the pruning with a snapshot in which there is no tombstone yet."""
    lane(connection, {"n": 1}, "same")
    connection.commit()
    finish_all()
    connection.execute(PRUNE_DONE, PRUNE_AT_ONCE)
    same = second.waits(lane, {"n": 1}, "same")
    connection.commit()
    assert same.result(20) is None
    lane(connection, {"n": 1}, "another")
    connection.commit()
    finish_all()
    connection.execute(PRUNE_DONE, PRUNE_AT_ONCE)
    conflict = second.waits(lane, {"n": 2}, "another")
    connection.commit()
    assert conflict.result(20) == keyed_id("test.insert", "another")
    assert keyed() == []
    assert transitions(keyed_id("test.insert", "same")) == []


@each_lane
def test_a_key_can_be_used_again_when_its_tombstone_is_pruned(
    lane: Lane, connection: Connection, stack: ServersOfTests
) -> None:
    id_ = lane(connection, {"n": 1}, "k")
    connection.commit()
    finish_all()
    prune(engine(), settings.current())
    move(stack, (settings.current().ingest_tombstone_retention_hours + 1) * 3600)
    assert prune(engine(), settings.current()).tombstones == 1
    assert lane(connection, {"n": 2}, "k") == id_
    connection.commit()
    assert keyed("status, payload") == [("QUEUED", {"n": 2})]


def test_a_tombstone_that_is_pruned_during_a_submit_makes_the_caller_repeat_it(
    stack: ServersOfTests, connection: Connection
) -> None:
    """The submit is stopped between its INSERT, which found the tombstone, and reading the tombstone."""
    new = [NewTask("test.insert", key="k"), NewTask("test.insert", key="l")]
    submit(connection, "test.insert", key="k")
    connection.commit()
    finish_all()
    prune(engine(), settings.current())
    with ThreadPoolExecutor(1) as threads, stack.cluster.superuser.connect() as other:
        other.execute(sql("LOCK TABLE ledger.ingest_task_transition IN SHARE MODE"))
        backend = pid(connection)
        submitting = threads.submit(submit_many, connection, new)
        wait_until(lambda: other.execute(WAITING, {"pids": [backend]}).scalar_one(), "the submit waits for the lock")
        other.execute(sql("DELETE FROM ledger.task_tombstone"))
        other.commit()
        with pytest.raises(LedgerBusy, match="submit it again"):
            submitting.result()
    assert all(each.created for each in submit_many(connection, new))
    connection.commit()
    assert len(keyed()) == 2


@each_lane
def test_a_repeatable_read_transaction_that_cannot_see_the_existing_task_must_repeat(
    lane: Lane, connection: Connection, second: Second
) -> None:
    other = second.connection
    other.connection.dbapi_connection.set_session(isolation_level="REPEATABLE READ")  # type: ignore[union-attr]
    other.execute(sql("SELECT ledger.ledger_now()"))
    lane(connection, {"n": 1}, "k")
    connection.commit()
    with pytest.raises(DBAPIError) as refusal:
        lane(other, {"n": 1}, "k")
    assert refusal.value.orig.pgcode == "40001"  # type: ignore[union-attr]
    other.rollback()
    assert lane(other, {"n": 1}, "k") == keyed_id("test.insert", "k")
    other.invalidate()  # its isolation level differs from the others of its pool


def test_a_conflict_names_the_existing_task_and_keeps_the_transaction_usable(session: Session) -> None:
    work.sink()
    session.execute(work.INTO_SINK, {"task_id": None, "note": "the caller's own row"})
    existing = submit(session, "test.insert", {"n": 1}, key="k").task_id
    with pytest.raises(IdempotencyConflict) as refused:
        submit(session, "test.insert", {"n": 2}, key="k")
    assert refused.value.task_id == existing
    assert str(existing) in refused.value.message
    assert (refused.value.http_status, refused.value.exit_code) == (409, 1)
    submit(session, "test.insert", {"n": 3}, key="another")
    session.commit()
    assert rows("payload") == [({"n": 1},), ({"n": 3},)]
    assert work.effects() == {None: 1}


def test_a_key_that_is_repeated_in_one_call_creates_one_task(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk in (1000, 2):  # in one statement, and in several
        monkeypatch.setattr(submit_module, "CHUNK", chunk)
        repeated = [NewTask("test.insert", {"n": 1}, key=f"same {chunk}") for _ in range(5)]
        found = submit_many(session, [NewTask("test.insert"), *repeated, NewTask("test.insert")])
        session.commit()
        assert [each.created for each in found] == [True, True, False, False, False, False, True]
        assert len({each.task_id for each in found}) == 3
        assert len(transitions(found[1].task_id)) == 1
        assert wakeups_of(found[1].task_id) == 1


def test_a_key_with_two_payloads_in_one_call_creates_no_task(session: Session) -> None:
    with pytest.raises(IdempotencyConflict):
        submit_many(session, [NewTask("test.insert", n, key="same") for n in range(2)])
    session.commit()
    assert len(rows()) == len(wakeups()) == 0


@pytest.mark.parametrize(("chunk", "count", "rounds"), [(1, 8, 25), (1000, 300, 10)], ids=["by one", "at once"])
def test_bulk_submits_of_the_same_keys_in_opposite_orders_never_deadlock(
    chunk: int, count: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one statement per key the two calls meet often. Capitals sort differently in most collations."""
    monkeypatch.setattr(submit_module, "CHUNK", chunk)
    barrier = Barrier(2, timeout=20)

    def submit_all(new: Sequence[NewTask]) -> int:
        with sessions()() as own:
            barrier.wait()
            found = submit_many(own, new)
            own.commit()
        return sum(each.created for each in found)

    with ThreadPoolExecutor(2) as threads:
        for round_ in range(rounds):
            new = [NewTask("test.insert", key=f"{'aBcé'[n % 4]} {round_} {n}") for n in range(count)]
            assert sum(threads.map(submit_all, (new, new[::-1]))) == count
    assert len(rows()) == rounds * count
