"""Settling: attempts, waits and final states, and no write under a lost lease."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy.orm import Session

import settings
from models.engine import engine
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import Discard, Permanent, Snooze, TryLater
from tasks.core.outcomes import (
    Dead,
    Discarded,
    ErrorCode,
    Failure,
    Isolated,
    Outcome,
    Released,
    Retry,
    Snoozed,
    Succeeded,
)
from tasks.core.registry import find
from tasks.core.task import Task
from tasks.execution import claim
from tasks.execution.settle import audit, write_outcomes
from tests.outbox.ledger import move, woken
from tests.outbox.table import pid
from tests.servers import ServersOfTests
from tests.tasks.deliveries import (
    audits,
    change,
    claimed,
    delivered,
    handled,
    inserting,
    leases,
    raising,
    scalar,
    scripted,
    submitted,
    take_away,
    wait_until_blocked,
)
from tests.tasks.work import OnPurpose, effects, rows, task, transitions, wakeups

FAILURE = Failure(ErrorCode.HANDLER_ERROR, "no", "no")
EVERY_OUTCOME: list[Outcome] = [
    Succeeded('{"a":1}'),
    Retry(FAILURE),
    Dead(FAILURE),
    Snoozed(60.0),
    Discarded("old"),
    Released("late"),
    Isolated("lost"),
]
LETTERS = "SELECT destination, payload, status FROM ledger.outbox_event WHERE payload ? 'dead' ORDER BY id"
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_(**values: Any) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        settings.current.cache_clear()

    return set_


def settle(claim: claim.Claim, db: Any, outcomes: Mapping[Task, Outcome], **how: Any) -> dict[Task, Outcome]:
    return write_outcomes(db, outcomes, token=claim.token, handler=find(claim.tasks[0].type), **how)


def settled(claim: claim.Claim, outcome: Outcome, **how: Any) -> set[uuid.UUID]:
    with Session(engine()) as db:
        found = settle(claim, db, dict.fromkeys(claim.tasks, outcome), **how)
        db.commit()
    return {each.id for each in found}


def wait_of(task_id: uuid.UUID) -> float:
    found = task(task_id)
    return float((found["next_retry_at"] - found["updated_at"]).total_seconds())


def letters() -> list[tuple[Any, ...]]:
    with engine().begin() as connection:
        return [tuple(row) for row in connection.execute(sql(LETTERS))]


@pytest.mark.parametrize("outcome", EVERY_OUTCOME, ids=lambda outcome: type(outcome).__name__)
def test_under_a_lost_token_no_outcome_is_written(outcome: Outcome) -> None:
    ids = submitted(3)
    claim = claimed(ids)
    token = take_away(ids[1])
    assert settled(claim, outcome, is_last=True) == {ids[0], ids[2]}
    assert task(ids[1])["lease_token"] == token
    assert [to for _, to in transitions(ids[1])] == ["QUEUED", "RUNNING"]
    assert not any(ids[1] in wakeup.ids for wakeup in wakeups()[1:])
    assert leases() == 0


@pytest.mark.parametrize("outcome", EVERY_OUTCOME, ids=lambda outcome: type(outcome).__name__)
def test_a_second_settling_under_the_same_token_writes_nothing(outcome: Outcome) -> None:
    """A token is invalid after its task was settled, also when the task runs again."""
    ids = submitted(2)
    first = claimed(ids)
    settled(first, outcome)
    before = rows("*")
    assert settled(first, Succeeded()) == set()
    assert rows("*") == before
    if isinstance(outcome, Released | Isolated):
        for id_ in ids:
            claimed([id_])
        assert settled(first, Dead(FAILURE)) == set()
        assert set(rows("status")) == {("RUNNING",)}


def test_a_settling_that_is_not_the_last_one_keeps_the_lease() -> None:
    claim = claimed(submitted(2))
    settled(claim, Succeeded(), is_last=False)
    assert leases() == 1


def test_several_outcomes_are_settled_together_and_the_lease_ends_with_them() -> None:
    ids = submitted(7)
    claim = claimed(ids)
    by_id = dict(zip(ids, EVERY_OUTCOME, strict=True))
    with Session(engine()) as db:
        done = settle(claim, db, {each: by_id[each.id] for each in claim.tasks}, is_last=True)
        assert {each.id: outcome for each, outcome in done.items()} == by_id
        db.rollback()
        assert set(rows("status")) == {("RUNNING",)}
        settle(claim, db, {each: by_id[each.id] for each in claim.tasks}, is_last=True)
        db.commit()
    statuses = ["SUCCEEDED", "RETRYING", "DEAD", "RETRYING", "DISCARDED", "QUEUED", "RETRYING"]
    assert rows() == list(zip(statuses, [0, 1, 1, 0, 0, 0, 0], strict=True))
    assert {len(transitions(id_)) for id_ in ids} == {3}
    assert leases() == 0


def test_a_holder_that_settles_during_reclaim_waits_and_is_refused() -> None:
    """Both lock the lease before its tasks; otherwise they would deadlock.

    If an assertion fails, `reclaim` is closed first, so that the thread gets its lock and can end. `late` is closed
    last, when the thread no longer uses its connection.
    """
    claim = claimed(submitted(3))
    with Session(engine()) as late, ThreadPoolExecutor(1) as thread, Session(engine()) as reclaim:
        reclaim.execute(sql("SELECT FROM ledger.task_lease FOR UPDATE"))
        outcomes = dict.fromkeys(claim.tasks, Succeeded())
        backend = pid(late.connection())
        answer = thread.submit(settle, claim, late, outcomes, is_last=True)
        wait_until_blocked(backend)
        lost = dict.fromkeys(claim.tasks, Isolated("lost"))
        assert len(settle(claim, reclaim, lost, is_last=True)) == 3
        reclaim.commit()
        assert answer.result() == {}
        late.commit()
    assert set(rows()) == {("RETRYING", 0)}


def test_reclaim_skips_a_lease_whose_holder_is_settling() -> None:
    ids = submitted(3)
    claim = claimed(ids)
    with Session(engine()) as holder, Session(engine()) as reclaim:
        settle(claim, holder, dict.fromkeys(claim.tasks, Succeeded()), is_last=True)
        locked = reclaim.execute(sql("SELECT token FROM ledger.task_lease FOR UPDATE SKIP LOCKED")).all()
        assert locked == []
        holder.commit()
    assert set(rows()) == {("SUCCEEDED", 0)}


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_task_is_dead_exactly_at_its_last_attempt(most: int, ledger: ServersOfTests) -> None:
    (id_,) = inserting({0: raising(OnPurpose("no"))}, 1, max_attempts=most)
    for attempt in range(1, most + 1):
        delivered([id_])
        found = task(id_)
        assert found["attempt_count"] == attempt
        assert found["status"] == ("DEAD" if attempt == most else "RETRYING")
        assert (found["next_retry_at"] is None) == (attempt == most)
        assert transitions(id_, "to_status, attempt_count, message")[-1] == (
            found["status"], attempt, "OnPurpose: no",
        )  # fmt: skip
        move(ledger, 600)
    delivered([id_])
    assert task(id_)["attempt_count"] == most
    assert letters() == [("celery:ingest.dlq", {"dead": str(id_), "errorCode": "handler_error"}, "NEW")]
    assert effects() == {}


def test_without_a_dead_letter_queue_a_dead_task_writes_no_dead_letter(setting: Any) -> None:
    setting(INGEST_DLQ_QUEUE="")
    delivered(inserting({0: raising(Permanent("no"))}, 1))
    assert rows("status") == [("DEAD",)]
    assert letters() == []


def test_the_backoff_doubles_up_to_its_maximum(setting: Any, ledger: ServersOfTests) -> None:
    """backoff(attempt) = min(base · 2^(attempt−1), maximum)"""
    setting(INGEST_RETRY_BASE_BACKOFF_MS=1500, INGEST_RETRY_MAX_BACKOFF_MS=10_000, INGEST_RETRY_JITTER=0)
    (id_,) = inserting({0: raising(OnPurpose())}, 1)
    waits = []
    for _ in range(6):
        delivered([id_])
        waits.append(wait_of(id_))
        assert wakeups()[-1].due_at == task(id_)["next_retry_at"] == task(id_)["last_wakeup_at"]
        move(ledger, 11)
    assert waits == [1.5, 3.0, 6.0, 10.0, 10.0, 10.0]


def test_with_jitter_tasks_that_failed_together_are_not_retried_together(setting: Any) -> None:
    """A service that was overloaded would get all of them again at the same moment."""
    setting(INGEST_RETRY_BASE_BACKOFF_MS=10_000, INGEST_RETRY_JITTER=0.3)
    ids = submitted(50)
    settled(claimed(ids), Retry(FAILURE))
    waits = [wait_of(id_) for id_ in ids]
    assert len(set(waits)) > 45
    assert 7 <= min(waits) < 10 < max(waits) <= 13


def test_the_last_backoff_of_a_handler_is_used_for_all_further_attempts(ledger: ServersOfTests) -> None:
    with handled("test.patient", lambda _task, _db: 1 / 0, backoff=[60, 0.25, 300]):
        (id_,) = submitted(1, "test.patient")
        waits = []
        for _ in range(5):
            delivered([id_])
            waits.append(wait_of(id_))
            move(ledger, 301)
    assert waits == [60, 0.25, 300, 300, 300]


def test_without_backoff_a_failed_task_is_due_at_once_and_woken_without_the_relay(
    setting: Any, ledger: ServersOfTests
) -> None:
    setting(INGEST_RETRY_BASE_BACKOFF_MS=0, INGEST_RETRY_MAX_BACKOFF_MS=0)
    (id_,) = inserting({0: raising(OnPurpose())}, 1, max_attempts=3)
    assert after_commit_publisher().wait_until_idle(20)
    ledger.flush_redis()
    delivered([id_])
    assert wait_of(id_) == 0
    assert after_commit_publisher().wait_until_idle(20)
    assert woken(ledger) == [[str(id_)]]
    assert [wakeup.status for wakeup in wakeups()] == ["SENT", "SENT"]
    delivered([id_])
    delivered([id_])
    assert rows() == [("DEAD", 3)]


@pytest.mark.parametrize("seconds", [0, 0.5, 3600])
def test_a_snooze_never_counts_as_an_attempt(seconds: float, ledger: ServersOfTests) -> None:
    (id_,) = inserting({0: raising(Snooze(seconds))}, 1, max_attempts=1)
    for _ in range(3):
        delivered([id_])
        assert rows() == [("RETRYING", 0)]
        assert wait_of(id_) == seconds
        move(ledger, seconds)
    assert transitions(id_, "message")[-1] == ("snoozed",)
    assert effects() == {}


@pytest.mark.parametrize(("seconds", "waits"), [(0, 1), (0.5, 1), (3600, 3600)])
def test_try_later_counts_as_an_attempt_and_waits_at_least_as_long_as_it_says(seconds: float, waits: float) -> None:
    ids = inserting({1: raising(TryLater("too many of us", seconds))}, 3, max_attempts=2)
    delivered(ids)
    assert rows() == [("SUCCEEDED", 0), ("RETRYING", 1), ("SUCCEEDED", 0)]
    assert wait_of(ids[1]) == waits
    assert task(ids[1])["error_message"] == "TryLater: too many of us"


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), 1e300, 4e9, "soon", None])
def test_a_snooze_with_an_impossible_duration_fails_only_its_own_task(seconds: Any) -> None:
    ids = inserting({1: lambda *_: Snooze(seconds)}, 3)
    delivered(ids)
    assert rows() == [("SUCCEEDED", 0), ("RETRYING", 1), ("SUCCEEDED", 0)]


def test_a_discarded_task_keeps_the_reason_and_no_error() -> None:
    (id_,) = inserting({0: raising(Discard("not\x00needed " + "x" * 1000))}, 1)
    change(id_, "last_error = 'before', error_message = 'before', attempt_count = 1")
    delivered([id_])
    found = task(id_)
    assert (found["status"], found["attempt_count"], found["error_message"]) == ("DISCARDED", 1, None)
    assert transitions(id_, "message")[-1][0].startswith("not\N{REPLACEMENT CHARACTER}needed x")


def test_a_success_after_failures_keeps_the_attempts_and_clears_the_error() -> None:
    (id_,) = inserting({}, 1)
    change(id_, "last_error = 'before', error_message = 'before', error_code = 'timeout', attempt_count = 3")
    delivered([id_])
    found = task(id_)
    assert (found["status"], found["attempt_count"]) == ("SUCCEEDED", 3)
    assert (found["last_error"], found["error_message"], found["error_code"]) == (None, None, None)


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        (lambda *_: {"ok": 1}, ("SUCCEEDED", 0, None)),
        (raising(Discard("old")), ("DISCARDED", 0, None)),
        (raising(Permanent("never")), ("DEAD", 1, "Permanent: never")),
    ],
    ids=["succeeded", "discarded", "dead"],
)
def test_the_notify_destination_gets_the_final_status(does: Any, expected: tuple[Any, ...], setting: Any) -> None:
    setting(OUTBOX_DESTINATIONS='{"crm": "redis:crm"}')
    (id_,) = scripted(does, notify="crm")
    delivered([id_])
    with engine().begin() as connection:
        statement = sql("SELECT payload FROM ledger.outbox_event WHERE destination = 'crm'")
        events = connection.execute(statement).scalars().all()
    status, attempts, error = expected
    assert events == [
        {"taskId": str(id_), "type": "test.scripted", "status": status, "attemptCount": attempts, "errorMessage": error}
    ]


def test_an_audit_records_the_current_state_of_the_task() -> None:
    ids = submitted(2)
    claim = claimed(ids)
    change(ids[0], "status = 'DEAD', lease_token = NULL, finished_at = ledger.ledger_now()")
    with engine().begin() as connection:
        audit(connection, [ids[0], uuid.UUID(int=0)], "late_success", token=claim.token, is_last=True)
    assert scalar("SELECT array_agg(detail ORDER BY id) FROM ledger.task_audit") == ["now DEAD", "gone"]
    assert (len(audits()), leases()) == (2, 0)
