"""What becomes of a task: one test for each row of the table in `tasks/execution/decision.py`."""

from __future__ import annotations

import inspect
import uuid
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy.exc import DBAPIError

from models.errors import LeaseLost
from models.guarded_session import TransactionMisused
from models.ledger_outage import REPETITIONS, outage
from settings import ROOT
from tasks import Discard, Permanent, QueuePaused, Snooze, TryLater
from tasks.core.outcomes import (
    DONE,
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
from tasks.core.registry import Handler
from tasks.core.task import Task
from tasks.execution.decision import (
    REPEAT,
    TABLE,
    Repeat,
    Situation,
    UnreadablePayload,
    dead_after_last_attempt,
    decide,
    decide_lost_process,
    decide_result,
)
from tasks.execution.stopping import WorkerStops
from tasks.execution.time_limits import SoftTimeLimit
from tasks.execution.transaction import LedgerLost, TransactionState

HANDLER = Handler("test.decision", lambda *_: None, permanent=(KeyError,))
OPEN, FAILED = TransactionState.OPEN, TransactionState.FAILED
ENDED, LOST = TransactionState.ENDED, TransactionState.LOST


def situation(**changes: Any) -> Situation:
    return Situation(HANDLER, **changes)


def database_error(sqlstate: str) -> DBAPIError:
    original: Any = SimpleNamespace(pgcode=sqlstate)
    return DBAPIError("", {}, original)


def described(outcome: Outcome | Repeat) -> str:
    """Return the outcome in one word, with the error code of a failure."""
    if isinstance(outcome, Retry | Dead):
        return f"{type(outcome).__name__} {outcome.failure.code}"
    return type(outcome).__name__


# The row of the table, what happened, and the outcome that is expected.
CASES: list[tuple[str, BaseException, Situation, str]] = [
    ("a signal stops the worker", WorkerStops(0), situation(), "Released"),
    ("a signal stops the worker", WorkerStops(0), situation(transaction=LOST), "Released"),
    ("the connection was lost", LedgerLost(), situation(transaction=LOST), "Released"),
    ("the connection was lost", KeyError(), situation(transaction=LOST, losses=1), "Released"),
    ("the connection was lost", KeyError(), situation(transaction=LOST, losses=2), "Retry ledger_lost"),
    ("the connection was lost", LedgerLost(), situation(transaction=LOST, is_alone=False), "Released"),
    ("the connection was lost", LedgerLost(), situation(transaction=LOST, is_alone=False, losses=1), "Isolated"),
    ("the connection was lost", LedgerLost(), situation(transaction=LOST, is_finish=True, losses=2), "Repeat"),
    (
        "the connection was lost",
        LedgerLost(),
        situation(transaction=LOST, is_finish=True, repetitions=REPETITIONS),
        "Released",
    ),
    ("the database asks for a repetition", database_error("40001"), situation(transaction=FAILED), "Repeat"),
    ("the database asks for a repetition", database_error("40P01"), situation(transaction=FAILED), "Repeat"),
    ("the database asks for a repetition", database_error("26000"), situation(transaction=FAILED), "Repeat"),
    (
        "the database asks for a repetition",
        database_error("40001"),
        situation(transaction=FAILED, repetitions=REPETITIONS),
        "Snoozed",
    ),
    ("the handler ended its transaction", KeyError(), situation(transaction=ENDED), "Dead transaction_misused"),
    (
        "the handler ended its transaction",
        TransactionMisused(),
        situation(transaction=OPEN),
        "Dead transaction_misused",
    ),
    (
        "the handler ended its transaction",
        database_error("34000"),
        situation(transaction=FAILED),
        "Dead transaction_misused",
    ),
    ("the payload cannot be read", UnreadablePayload(), situation(), "Dead bad_payload"),
    ("the soft limit", SoftTimeLimit(3), situation(transaction=OPEN), "Retry timeout"),
    ("the soft limit", SoftTimeLimitExceeded(), situation(), "Retry timeout"),
    ("Snooze", Snooze(60), situation(transaction=OPEN), "Snoozed"),
    ("Discard", Discard("not needed"), situation(), "Discarded"),
    ("Permanent", Permanent("never"), situation(), "Dead permanent"),
    ("TryLater", TryLater("busy", 60), situation(), "Retry handler_error"),
    ("a queue refused a task that the handler submitted", QueuePaused(), situation(transaction=OPEN), "Snoozed"),
    ("LeaseLost", LeaseLost(), situation(), "Retry lease_lost"),
    ("an error that the handler declares permanent", KeyError(), situation(transaction=OPEN), "Dead permanent"),
    ("any other error", ValueError(), situation(transaction=FAILED), "Retry handler_error"),
    ("any other error", SystemExit(1), situation(), "Retry handler_error"),
    ("any other error", database_error("40001"), situation(), "Retry handler_error"),  # of the handler's own database
]


@pytest.mark.guarantee
@pytest.mark.parametrize(("row", "error", "now", "expected"), CASES, ids=lambda value: str(value)[:40])
def test_what_happened_leads_to_its_outcome(row: str, error: BaseException, now: Situation, expected: str) -> None:
    assert next(each.what for each in TABLE if each.applies(error, now)) == row
    assert described(decide(error, now)) == expected


IN_OUTAGE = "the soft limit while the ledger is unreachable"


def test_a_soft_limit_that_strikes_while_a_step_waits_for_the_ledger_is_not_charged() -> None:
    try:
        outage.note_failure(LedgerLost())
        test_what_happened_leads_to_its_outcome(IN_OUTAGE, SoftTimeLimit(3), situation(), "Released")
    finally:
        outage.note_answer()
    test_what_happened_leads_to_its_outcome("the soft limit", SoftTimeLimit(3), situation(), "Retry timeout")


def test_every_row_of_the_table_has_a_case_and_is_explained() -> None:
    assert {row for row, *_ in CASES} | {IN_OUTAGE} == {row.what for row in TABLE}
    page = (ROOT / "docs" / "internals.md").read_text()
    for documentation in (inspect.getdoc(inspect.getmodule(decide)) or "", page):
        assert [row.what for row in TABLE if row.what not in documentation] == []


def test_outcomes_carry_what_the_handler_said() -> None:
    assert decide(Snooze(60), situation()) == Snoozed(60)
    assert decide(Discard("old"), situation()) == Discarded("old")
    later = decide(TryLater("busy", 60), situation())
    assert isinstance(later, Retry)
    assert later.least_seconds == 60
    assert decide(database_error("40001"), situation(transaction=FAILED)) is REPEAT


def test_the_sentence_of_an_ended_transaction_says_what_the_handler_did() -> None:
    """The error itself may be "DataError: invalid input syntax for type integer", from the guard against a COMMIT."""
    outcome = decide(ValueError("invalid input syntax for type integer"), situation(transaction=ENDED))
    assert isinstance(outcome, Dead)
    assert outcome.failure.message.startswith("The handler ended the transaction that it was given")
    assert "invalid input syntax" in outcome.failure.trace


@pytest.mark.parametrize(
    ("result", "expected"),
    [(None, DONE), ({"a": 1}, Succeeded('{"a":1}')), (Snooze(5), Snoozed(5)), (Discard("old"), Discarded("old"))],
)
def test_a_result_or_a_returned_verdict_leads_to_its_outcome(result: Any, expected: Outcome) -> None:
    assert decide_result(result, situation()) == expected


def test_a_result_that_cannot_be_stored_is_a_failure() -> None:
    assert described(decide_result(object(), situation())) == "Retry bad_result"


@pytest.mark.parametrize(
    ("count", "reason", "expected"),
    [
        (1, None, "Retry worker_lost"),
        (1, "The handler exceeded its hard limit of 3 s.", "Retry timeout"),
        (2, None, "Isolated"),
        (2, "The handler exceeded its hard limit of 3 s.", "Isolated"),
    ],
)
def test_only_a_task_that_ran_alone_is_charged_with_a_lost_process(
    count: int, reason: str | None, expected: str
) -> None:
    outcomes = decide_lost_process([task() for _ in range(count)], "host:1", reason)
    assert [described(outcome) for outcome in outcomes.values()] == [expected] * count


@pytest.mark.parametrize(
    ("count", "losses", "reason", "expected"),
    [
        (1, 0, None, "Released"),
        (1, 1, None, "Released"),
        (1, 2, None, "Retry worker_lost"),
        (2, 0, None, "Released"),
        (2, 2, None, "Isolated"),
        (1, 0, "The handler exceeded its hard limit of 3 s.", "Retry timeout"),
    ],
)
def test_a_worker_that_is_lost_while_postgresql_restarts_is_charged_at_the_third_time_in_a_row(
    count: int, losses: int, reason: str | None, expected: str
) -> None:
    tasks = [task() for _ in range(count)]
    outcomes = decide_lost_process(tasks, "host:1", reason, losses_in_restarts=losses)
    assert [described(outcome) for outcome in outcomes.values()] == [expected] * count


@pytest.mark.parametrize(("attempts", "expected"), [(0, "Retry handler_error"), (2, "Dead handler_error")])
def test_the_failure_of_the_last_attempt_is_the_end(attempts: int, expected: str) -> None:
    failed = Retry(Failure(ErrorCode.HANDLER_ERROR, "no", "no"))
    assert described(dead_after_last_attempt(task(attempts), failed)) == expected


@pytest.mark.parametrize("outcome", [DONE, Snoozed(1), Released(""), Isolated("")], ids=described)
def test_an_outcome_that_is_not_a_failure_never_becomes_dead(outcome: Outcome) -> None:
    assert dead_after_last_attempt(task(2), outcome) is outcome


def task(attempt_count: int = 0) -> Task:
    """A task with three attempts."""
    return Task(uuid.uuid4(), "test.decision", {}, {}, "ingest", 5, attempt_count, 3, None, None, datetime.now(UTC))
