"""What becomes of a task that ran. Every such decision is a row of the table below, and is made here and nowhere else.

    what happened                                      outcome                                                 attempt
    the handler returned                               Succeeded, or Retry `bad_result`                        no/yes
    a signal stops the worker                          Released                                                no
    the connection was lost in a shared transaction    Released; the second time in a row Isolated             no
    the connection was lost, the task was alone        Released; the third time in a row Retry `ledger_lost`   no/yes
    the connection was lost while `Finish` was written REPEAT the transaction, five times                      no
    the database asks for a repetition                 REPEAT the transaction, then Snoozed for a second       no
    the handler ended its transaction                  Dead `transaction_misused`                              yes
    the payload cannot be read                         Dead `bad_payload`                                      yes
    the soft limit while the ledger is unreachable     Released                                                no
    the soft limit                                     Retry `timeout`                                         yes
    Snooze, Discard                                    Snoozed, Discarded                                      no
    Permanent, TryLater                                Dead `permanent`, Retry `handler_error`                 yes
    a queue refused a task that the handler submitted  Snoozed for 30 seconds                                  no
    LeaseLost                                          Retry `lease_lost`, unless another worker has the task  yes
    an error that the handler declares permanent       Dead `permanent`                                        yes
    any other error                                    Retry `handler_error`                                   yes
    the process was lost while PostgreSQL restarted    Released; the third time in a row as in the next row    no/yes
    the process was lost, the task was alone           Retry `worker_lost`; `timeout` after the hard limit     yes
    the process was lost with several tasks            Isolated                                                no
    the same, an async or unknown type, not isolated   Isolated                                                no

"Attempt" says whether it counts as one. The first row that applies decides. Retry becomes Dead with the last attempt.
In a shared transaction everything is rolled back first; the outcome then belongs to the task that caused it, and all
tasks before it run again together, and those behind it run together; if the culprit is unknown, all run one by one
(`run.py`). Tasks that did not get to run are released there, too. Two events are not in the
table because they are not outcomes: while the ledger is unreachable, the process waits for it
(`models/ledger_outage.py`); for a task that another worker has taken over, it writes nothing but an audit
(`settle.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy.exc import DBAPIError

from models.driver_values import storable
from models.errors import LeaseLost
from models.guarded_session import TransactionMisused
from models.ledger_outage import REPETITIONS, asks_to_repeat, outage
from outbox.canonical_json import BadPayload, canonical_json
from tasks.core.outcomes import (
    DONE,
    SENTENCE_LIMIT,
    Dead,
    Discard,
    Discarded,
    ErrorCode,
    Failure,
    Isolated,
    Outcome,
    Permanent,
    Raised,
    Released,
    Retry,
    Snooze,
    Snoozed,
    Succeeded,
    TryLater,
    Verdict,
)
from tasks.core.registry import Handler
from tasks.core.task import Task
from tasks.execution.settle_statements import COMMIT_REFUSED, NO_SUCH_CURSOR
from tasks.execution.stopping import what_stops
from tasks.execution.time_limits import SoftTimeLimit
from tasks.execution.transaction import TransactionState
from tasks.submission.closed_queues import QueueClosed

LOSSES_BEFORE_CHARGE: Final = 2  # a handler that crashes its PostgreSQL backend must not run again for ever
CONNECTION_LOST: Final = "the connection to PostgreSQL was lost"
CONNECTION_LOST_BY_BATCH: Final = f"{CONNECTION_LOST} while its batch ran"
LOST_IN_RESTART: Final = "its worker was lost while PostgreSQL restarted"
LIMIT_IN_OUTAGE: Final = Released("its soft limit was reached while PostgreSQL was unreachable")
LOST_TOO_OFTEN: Final = "The connection to PostgreSQL was lost three times in a row while this task ran alone."
REPEATED_TOO_OFTEN: Final = Snoozed(1.0, "the database asked too often for a repetition")


class UnreadablePayload(Exception):
    """The payload or the context cannot be read: a number is too long, or it is nested too deeply."""

    def __init__(self) -> None:
        super().__init__(self.__doc__)


class Repeat:
    """Not an outcome: run the same transaction again."""


REPEAT: Final = Repeat()


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision depends on besides the error."""

    handler: Handler
    is_alone: bool = True  # the only task of its transaction, or outside any
    transaction: TransactionState | None = None  # after the error; None outside a transaction
    repetitions: int = 0  # of this transaction so far
    is_finish: bool = False  # the transaction of `Finish`, after a handler that ran outside
    losses: int = 0  # how often in a row it has lost its connection before, in the same company: alone, or with others


class Row(NamedTuple):
    """One row of the table."""

    what: str
    applies: Callable[[Any, Situation], object]
    outcome: Callable[[Any, Situation], Outcome | Repeat]


def _failure(error: BaseException, code: ErrorCode = ErrorCode.HANDLER_ERROR) -> Failure:
    return Failure.of(error, code)


def _decide_lost_connection(error: BaseException, now: Situation) -> Outcome | Repeat:
    if now.is_finish and now.repetitions < REPETITIONS:
        return REPEAT
    if not now.is_alone:
        return Isolated(CONNECTION_LOST_BY_BATCH) if now.losses else Released(CONNECTION_LOST_BY_BATCH)
    if now.losses >= LOSSES_BEFORE_CHARGE:
        return Retry(replace(_failure(error, ErrorCode.LEDGER_LOST), message=LOST_TOO_OFTEN))
    return Released(CONNECTION_LOST)


def _is_soft_limit(error: BaseException) -> bool:
    return isinstance(error, SoftTimeLimit | SoftTimeLimitExceeded)


def _has_ended_transaction(error: BaseException, now: Situation) -> bool:
    """Return True also if settling found another transaction, or if the database has refused a COMMIT of the handler.

    The ORM's own commit leaves the session as after a failed flush, so the state of the transaction does not tell.
    """
    is_told = isinstance(error, DBAPIError) and (
        getattr(error.orig, "pgcode", None) == NO_SUCH_CURSOR or COMMIT_REFUSED in str(error.orig)
    )
    return is_told or now.transaction is TransactionState.ENDED or isinstance(error, TransactionMisused)


def _decide_ended_transaction(error: BaseException, _now: Situation) -> Outcome:
    """Return Dead: what the handler wrote after it ended its transaction may be committed, so it must not run again."""
    return Dead(replace(_failure(error, ErrorCode.TRANSACTION_MISUSED), message=str(TransactionMisused())))


TABLE: Final = (
    Row(
        "a signal stops the worker",
        lambda error, _: what_stops(error),
        lambda error, _: Released(f"the worker stopped: {type(what_stops(error)).__name__}"),
    ),
    Row(
        "the connection was lost",
        lambda _, now: now.transaction is TransactionState.LOST,
        _decide_lost_connection,
    ),
    Row(
        "the database asks for a repetition",
        lambda error, now: now.transaction is not None and asks_to_repeat(error),
        lambda _, now: REPEAT if now.repetitions < REPETITIONS else REPEATED_TOO_OFTEN,
    ),
    Row("the handler ended its transaction", _has_ended_transaction, _decide_ended_transaction),
    Row(
        "the payload cannot be read",
        lambda error, _: isinstance(error, UnreadablePayload),
        lambda error, _: Dead(Failure(ErrorCode.BAD_PAYLOAD, str(error), str(error), Raised(error))),
    ),
    Row(
        "the soft limit while the ledger is unreachable",  # a step waits for the ledger without end
        lambda error, _: _is_soft_limit(error) and outage.is_on,
        lambda *_: LIMIT_IN_OUTAGE,
    ),
    Row(
        "the soft limit",
        lambda error, _: _is_soft_limit(error),
        lambda error, _: Retry(_failure(error, ErrorCode.TIMEOUT)),
    ),
    Row("Snooze", lambda error, _: isinstance(error, Snooze), lambda error, _: Snoozed(error.seconds)),
    Row(
        "Discard",
        lambda error, _: isinstance(error, Discard),
        lambda error, _: Discarded(storable(error.why[:SENTENCE_LIMIT])),
    ),
    Row(
        "Permanent",
        lambda error, _: isinstance(error, Permanent),
        lambda error, _: Dead(_failure(error, ErrorCode.PERMANENT)),
    ),
    Row(
        "TryLater",
        lambda error, _: isinstance(error, TryLater),
        lambda error, _: Retry(_failure(error), error.seconds),
    ),
    Row(
        "a queue refused a task that the handler submitted",
        lambda error, _: isinstance(error, QueueClosed),
        lambda error, _: Snoozed(error.retry_after_seconds, storable(error.message[:SENTENCE_LIMIT])),
    ),
    Row(
        "LeaseLost",
        lambda error, _: isinstance(error, LeaseLost),
        lambda error, _: Retry(_failure(error, ErrorCode.LEASE_LOST)),
    ),
    Row(
        "an error that the handler declares permanent",
        lambda error, now: isinstance(error, Exception) and now.handler.is_permanent(error),
        lambda error, _: Dead(_failure(error, ErrorCode.PERMANENT)),
    ),
    Row("any other error", lambda *_: True, lambda error, _: Retry(_failure(error))),
)


def decide(error: BaseException, now: Situation) -> Outcome | Repeat:
    """Return what becomes of the task that caused this error."""
    return next(row.outcome(error, now) for row in TABLE if row.applies(error, now))


def decide_result(result: Any, now: Situation) -> Outcome:
    """Return what becomes of a task whose handler returned this. A bad result is a failure of this task only."""
    if result is None:
        return DONE
    if isinstance(result, Verdict):
        verdict = decide(result, now)
        assert not isinstance(verdict, Repeat)
        return verdict
    try:
        return Succeeded(canonical_json(result, what="result"))
    except BadPayload as error:
        return Retry(_failure(error, ErrorCode.BAD_RESULT))


def decide_lost_process(
    tasks: Sequence[Task],
    holder: str,
    reason: str | None,
    *,
    losses_in_restarts: int | None = None,
    may_be_async: bool = False,
) -> dict[Task, Outcome]:
    """Return what becomes of the tasks that a lost process held. `reason`: why it was ended, if that is known.

    Only a task that ran alone is charged; of several, the culprit is unknown (docs/protocol.md, Poison). A process that
    runs an async handler may have held others under other leases, so with `may_be_async` only an isolated task is
    charged. If PostgreSQL restarted meanwhile, `losses_in_restarts` says how often in a row that has happened to it
    before.
    """
    if losses_in_restarts is not None and losses_in_restarts < LOSSES_BEFORE_CHARGE and not reason:
        return dict.fromkeys(tasks, Released(LOST_IN_RESTART))
    if len(tasks) == 1 and (tasks[0].isolated or not may_be_async):
        code = ErrorCode.TIMEOUT if reason else ErrorCode.WORKER_LOST
        sentence = reason or f"The worker {holder} was lost while it ran this task."
        return {tasks[0]: Retry(Failure(code, sentence, sentence))}
    return dict.fromkeys(tasks, Isolated(reason or f"the worker {holder} was lost with its batch"))


def dead_after_last_attempt(task: Task, outcome: Outcome) -> Outcome:
    """Turn the failure of the last attempt into Dead."""
    if isinstance(outcome, Retry) and task.attempt_count + 1 >= task.max_attempts:
        return Dead(outcome.failure)
    return outcome
