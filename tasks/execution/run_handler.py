"""Calling a handler: within its limits, and whatever it does becomes an outcome."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy.exc import DBAPIError

from failpoint import failpoint
from models.driver_values import UnparsableJson
from models.errors import LeaseLost
from tasks.core.lease import HeldLease
from tasks.core.outcomes import (
    DONE,
    Dead,
    ErrorCode,
    Failure,
    Finish,
    Outcome,
    Retry,
    Verdict,
    outcome_of,
    outcome_of_result,
)
from tasks.core.registry import Handler
from tasks.core.steps import StepsLost
from tasks.core.task import Task
from tasks.execution.stopping import LONGEST_CHAIN, what_stops
from tasks.execution.time_limits import SoftLimit, SoftTimeLimit
from tasks.execution.transaction import HandlerSession, LedgerLost, TransactionMisused

logger = logging.getLogger(__name__)

SERIALIZATION_FAILURES: Final = {"40001", "40P01"}  # never a task's fault, and gone the next time (P14)
_SENTENCE: Final = "The payload or the context cannot be read: a number is too long, or it is nested too deeply."
UNREADABLE: Final = Dead(Failure(ErrorCode.BAD_PAYLOAD, _SENTENCE, _SENTENCE))


class Repeat(Exception):
    """The database asked for the transaction to be repeated."""


def call(
    handler: Handler, tasks: Sequence[Task], db: HandlerSession, held: HeldLease, limit: SoftLimit
) -> list[Outcome]:
    """One outcome for each task; of a handler of many that failed, the same for all.

    Raises `Repeat` and `LedgerLost`, which are no task's outcome. What ends this process goes through.
    """
    if not all(map(_is_readable, tasks)):
        return [UNREADABLE] * len(tasks)
    process = os.getpid()
    try:
        with _hard_limit(handler, held):
            result = limit.call(handler.function, list(tasks) if handler.many else tasks[0], db)
            _end_a_child_of(process)
            failpoint("ingest.in_handler")
            db.take_stock()
        if result is None:
            return [DONE] * len(tasks)
        return [outcome_of_result(each) for each in (_each_of(result, tasks) if handler.many else [result])]
    except BaseException as error:
        _end_a_child_of(process, error)
        if stopped := what_stops(error):
            raise stopped from None
        return [_failed(error, db, handler)] * len(tasks)


def call_outside(handler: Handler, task: Task, held: HeldLease, limit: SoftLimit) -> Outcome | Finish:
    """Outside any transaction. `Finish` is not the end yet."""
    if not _is_readable(task):
        return UNREADABLE
    process = os.getpid()
    try:
        with _hard_limit(handler, held):
            result = limit.call(handler.function, task)
            _end_a_child_of(process)
            failpoint("ingest.in_handler")
        return result if isinstance(result, Finish) else outcome_of_result(result)
    except BaseException as error:
        _end_a_child_of(process, error)
        if stopped := what_stops(error):
            raise stopped from None
        return _failed(error, None, handler)


def _end_a_child_of(process: int, error: BaseException | None = None) -> None:
    """A child that a handler has forked ends here: it has our connection and our messages, and they are not its own."""
    if os.getpid() == process:
        return
    is_well = error is None or (isinstance(error, SystemExit) and not error.code)
    if not is_well and not isinstance(error, SystemExit):
        logger.error("a child of a handler failed", exc_info=error)
    os._exit(0 if is_well else 1)


def _is_readable(task: Task) -> bool:
    return not isinstance(task.payload, UnparsableJson) and not isinstance(task.context, UnparsableJson)


@contextmanager
def _hard_limit(handler: Handler, held: HeldLease) -> Iterator[None]:
    held.hard_limit_at = time.monotonic() + handler.hard_limit_seconds
    try:
        yield
    finally:
        held.hard_limit_at = None


def is_serialization_failure(error: BaseException | None) -> bool:
    """Also when the handler made another error of it."""
    for _ in range(LONGEST_CHAIN):
        if isinstance(error, DBAPIError) and getattr(error.orig, "pgcode", None) in SERIALIZATION_FAILURES:
            return True
        error = error and (error.__cause__ or error.__context__)
    return False


def _failed(error: BaseException, db: HandlerSession | None, handler: Handler) -> Outcome:
    """What it means depends on what is left of the transaction, whatever the handler made of the error."""
    if db is not None:
        if db.is_lost:
            raise LedgerLost from error
        if is_serialization_failure(error):
            raise Repeat from error
        if db.was_ended:  # what it wrote afterwards may be there: never again
            return Dead(Failure.of(error, ErrorCode.TRANSACTION_MISUSED))
    match error:
        case TransactionMisused():
            return Retry(Failure.of(error, ErrorCode.TRANSACTION_MISUSED))
        case SoftTimeLimit():
            return Retry(Failure.of(error, ErrorCode.TIMEOUT))
        case StepsLost():  # no error of the handler's own
            return Retry(Failure.of(error, ErrorCode.LEDGER_LOST))
        case Exception() if not isinstance(error, Verdict | LeaseLost) and handler.is_permanent(error):
            return Dead(Failure.of(error, ErrorCode.PERMANENT))
        case _:
            return outcome_of(error)


def _each_of(result: Any, tasks: Sequence[Task]) -> list[Any]:
    """A handler of many returns nothing, or a result for each task, in their order."""
    if isinstance(result, list | tuple) and len(result) == len(tasks):
        return list(result)
    raise TypeError(f"A handler of many returns None, or a list of {len(tasks)} results here: one for each task.")
