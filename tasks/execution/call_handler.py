"""Call the user's function for some tasks, within its time limits."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import tracing
from failpoint import failpoint
from models.driver_values import UnparsableJson
from tasks.core.lease import HeldLease, WatchedTask
from tasks.core.outcomes import Dead, Retry
from tasks.core.registry import Handler
from tasks.core.task import Task
from tasks.execution.celery_signals import send_postrun, send_prerun
from tasks.execution.claim import Claim
from tasks.execution.decision import Situation, UnreadablePayload, decide
from tasks.execution.event_loop import soft_limit_on_loop
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
    result: Any = None
    is_called = False
    trace = tracing.Run(tasks, is_batch=handler.many)
    try:
        if not all(map(_is_readable, tasks)):
            raise UnreadablePayload
        lease.running = None if handler.many else tasks[0]
        lease.hard_limit_seconds = handler.hard_limit_seconds
        lease.hard_limit_at = started_at + handler.hard_limit_seconds
        note_limit(lease.hard_limit_at, handler.hard_limit_seconds)
        if tasks[0] not in claim.seconds_outside:  # otherwise this is `Finish.write`, after the handler has returned
            send_prerun(tasks)
            is_called = True
        given = list(tasks) if handler.many else tasks[0]
        if db is not None and not handler.many:  # `run_outside` does the same for other handlers
            lease.watched = WatchedTask(tasks[0].id, claim.soft_limit.interrupter_of_next_call())
        result = claim.soft_limit.call(handler.function, *((given,) if db is None else (given, db)))
        if os.getpid() == process:
            failpoint("ingest.in_handler")
            if db is not None:
                db.flush_and_check()
    except BaseException as raised:
        error = raised
        if trace.is_recorded and isinstance(failed := decide(raised, Situation(handler)), Retry | Dead):
            trace.fail(raised, failed.failure.code)
        raise
    finally:
        if os.getpid() != process:
            _end_forked_child(error)
        if is_called:
            send_postrun(handler, tasks, result, error)
        error = None  # its traceback refers to this frame
        if db is not None:
            lease.watched = None
        lease.hard_limit_at = None
        forget_limit()
        trace.leave()
        claim.add_seconds(tasks, time.monotonic() - started_at)
    return _result_per_task(result, tasks) if handler.many else [result]


async def call_async_handler(claim: Claim, task: Task, lease: HeldLease) -> Any:
    """Return what an async handler returned, or raise what it raised. Its soft limit cancels it."""
    handler = claim.handler
    started_at = time.monotonic()
    error: BaseException | None = None
    result: Any = None
    is_called = False
    trace = tracing.Run([task], is_batch=False)
    try:
        if not _is_readable(task):
            raise UnreadablePayload
        send_prerun([task])
        is_called = True
        lease.running = task
        lease.hard_limit_seconds = handler.hard_limit_seconds
        lease.hard_limit_at = started_at + handler.hard_limit_seconds
        async with soft_limit_on_loop(handler.soft_limit_seconds):
            result = await handler.function(task)
        failpoint("ingest.in_handler")
        return result
    except BaseException as raised:
        error = raised
        if trace.is_recorded and isinstance(failed := decide(raised, Situation(handler)), Retry | Dead):
            trace.fail(raised, failed.failure.code)
        raise
    finally:
        if is_called:
            send_postrun(handler, [task], result, error)
        error = None  # its traceback refers to this frame
        lease.hard_limit_at = None
        trace.leave()
        claim.add_seconds([task], time.monotonic() - started_at)


def _is_readable(task: Task) -> bool:
    return not isinstance(task.payload, UnparsableJson) and not isinstance(task.context, UnparsableJson)


def _end_forked_child(error: BaseException | None) -> None:
    succeeded = error is None or (isinstance(error, SystemExit) and not error.code)
    if not succeeded and not isinstance(error, SystemExit):
        logger.error(
            "A process that a handler forked failed.", exc_info=error, extra={"event": "forked_process_failed"}
        )
    os._exit(0 if succeeded else 1)


def _result_per_task(result: Any, tasks: Sequence[Task]) -> list[Any]:
    """Return one result per task: a batch handler returns None, or a list with a result for each task in order."""
    if result is None:
        return [None] * len(tasks)
    if isinstance(result, list | tuple) and len(result) == len(tasks):
        return list(result)
    raise TypeError(f"A batch handler returns None, or a list of {len(tasks)} results here: one for each task.")
