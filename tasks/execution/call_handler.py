"""Call the user's function for some tasks, within its time limits."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from failpoint import failpoint
from models.driver_values import UnparsableJson
from tasks.core.registry import Handler
from tasks.core.task import Task
from tasks.execution.claim import Claim
from tasks.execution.decision import UnreadablePayload
from tasks.execution.hard_limits import forget_limit, note_limit
from tasks.execution.transaction import HandlerSession

logger = logging.getLogger(__name__)


def call_handler(claim: Claim, handler: Handler, tasks: Sequence[Task], db: HandlerSession | None = None) -> list[Any]:
    """Return what the handler returned, one result per task, or raise what it raised.

    A transactional handler is given `db`. If the handler has forked and the child process returns, the child ends here:
    it must not use the connections and messages that it shares with this process.
    """
    process = os.getpid()
    lease = claim.lease
    started_at = time.monotonic()
    error: BaseException | None = None
    try:
        if not all(map(_is_readable, tasks)):
            raise UnreadablePayload
        lease.hard_limit_seconds = handler.hard_limit_seconds
        lease.hard_limit_at = started_at + handler.hard_limit_seconds
        note_limit(lease.hard_limit_at, handler.hard_limit_seconds)
        given = list(tasks) if handler.many else tasks[0]
        result = claim.soft_limit.call(handler.function, *((given,) if db is None else (given, db)))
        if os.getpid() == process:
            failpoint("ingest.in_handler")
            if db is not None:
                db.flush_and_check()
    except BaseException as raised:
        error = raised
        raise
    finally:
        if os.getpid() != process:
            _end_forked_child(error)
        lease.hard_limit_at = None
        forget_limit()
        claim.add_seconds(tasks, time.monotonic() - started_at)
    return _result_per_task(result, tasks) if handler.many else [result]


def _is_readable(task: Task) -> bool:
    return not isinstance(task.payload, UnparsableJson) and not isinstance(task.context, UnparsableJson)


def _end_forked_child(error: BaseException | None) -> None:
    succeeded = error is None or (isinstance(error, SystemExit) and not error.code)
    if not succeeded and not isinstance(error, SystemExit):
        logger.error("A process that a handler forked failed.", exc_info=error)
    os._exit(0 if succeeded else 1)


def _result_per_task(result: Any, tasks: Sequence[Task]) -> list[Any]:
    """Return one result per task: a batch handler returns None, or a list with a result for each task in order."""
    if result is None:
        return [None] * len(tasks)
    if isinstance(result, list | tuple) and len(result) == len(tasks):
        return list(result)
    raise TypeError(f"A batch handler returns None, or a list of {len(tasks)} results here: one for each task.")
