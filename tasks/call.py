"""Calling a handler: within its limits, and whatever it does becomes an outcome."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy.exc import DBAPIError, OperationalError

from failpoint import failpoint
from models.errors import Unreachable
from tasks.handler_session import HandlerSession
from tasks.heartbeat import Held
from tasks.limits import SoftTimeLimit, soft_limit
from tasks.outcomes import ErrorCode, Failure, Outcome, Retry, outcome_of, outcome_of_result
from tasks.registry import Handler
from tasks.task import Task

SERIALIZATION_FAILURES: Final = {"40001", "40P01"}  # never a task's fault, and gone the next time (P14)


class Repeat(Exception):
    """The database asked for the transaction to be repeated."""


def call(handler: Handler, tasks: Sequence[Task], db: HandlerSession, held: Held) -> list[Outcome]:
    """One outcome for each task; of a handler of many that failed, the same for all.

    Raises `Repeat`, and what means that the connection to the ledger is gone: neither is a task's outcome. What ends a
    process (SystemExit, Ctrl-C) goes through.
    """
    try:
        held.hard_limit_at = time.monotonic() + handler.hard_limit_seconds
        with soft_limit(handler.soft_limit_seconds):
            result = handler.function(list(tasks) if handler.many else tasks[0], db)
        failpoint("ingest.in_handler")
        db.flush()  # what the ORM still holds is this task's doing, and so is its failure
        if handler.many:
            return [outcome_of_result(each) for each in _each_of(result, tasks)]
        return [outcome_of_result(result)]
    except SoftTimeLimit as error:
        return [Retry(Failure.of(error, ErrorCode.TIMEOUT))] * len(tasks)
    except Unreachable:
        raise
    except DBAPIError as error:
        if is_serialization_failure(error):
            raise Repeat from error
        if isinstance(error, OperationalError) and error.connection_invalidated:
            raise
        return [outcome_of(error)] * len(tasks)
    except Exception as error:
        return [outcome_of(error)] * len(tasks)
    finally:
        held.hard_limit_at = None


def is_serialization_failure(error: DBAPIError) -> bool:
    return getattr(error.orig, "pgcode", None) in SERIALIZATION_FAILURES


def _each_of(result: Any, tasks: Sequence[Task]) -> list[Any]:
    """A handler of many returns nothing, or a result for each task, in their order."""
    if result is None:
        return [None] * len(tasks)
    if isinstance(result, list | tuple) and len(result) == len(tasks):
        return list(result)
    raise TypeError(f"A handler of many returns None, or a list of {len(tasks)} results here: one for each task.")
