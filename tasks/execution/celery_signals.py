"""Send Celery's signals for tasks of the ledger: Celery itself sends them for `tasks.ingest` only.

    task_prerun, task_postrun    around a call of the handler; for a batch handler once for each task of the batch
    task_success                 after SUCCEEDED is committed, with `result` and `runtime`
    task_retry                   after a failed attempt that will be repeated, with `reason`
    task_failure                 after a task is DEAD, with `exception`

The last three are sent once per attempt. The first two are sent for every call of the handler, also if a transaction
was rolled back because of another task and the handler is called again: receivers that prepare something for the
handler must be called then, too. A lost process sends nothing; the process that settles its tasks sends
`task_retry` or `task_failure` with a `WorkerLostError`.

A receiver that raises an exception does no harm: Celery logs it. If no receiver is connected to a signal, nothing is
made for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery import states
from celery.app.task import Context
from celery.signals import task_failure, task_postrun, task_prerun, task_retry, task_success

from tasks.core.outcomes import Dead, Discarded, Failure, Outcome, Retry, Succeeded, Verdict
from tasks.core.registry import Handler
from tasks.core.task import Task
from tasks.execution.decision import Situation, dead_after_last_attempt, decide

NO_SECONDS: Final[Mapping[Task, float]] = {}
_STATES: Final[dict[type[Any], str]] = {Dead: states.FAILURE, Discarded: states.REVOKED}  # all others: RETRY


class Sender(str):
    """The sender of a signal: the type of the task, so that `connect(sender="invoice.import")` selects by type.

    Receivers that were written for Celery's tasks read `name`, `request.id` and `request.retries`.
    """

    request: Context

    @classmethod
    def of(cls, task: Task) -> Sender:
        sender = cls(task.type)
        sender.request = Context(
            id=str(task.id), task=task.type, retries=task.attempt_count, args=(), kwargs={}, is_eager=False
        )
        return sender

    @property
    def name(self) -> str:
        return str(self)


def send_prerun(tasks: Sequence[Task]) -> None:
    """Tell receivers that the handler is called for these tasks now."""
    if task_prerun.receivers:
        for task in tasks:
            task_prerun.send(**_about(task))


def send_postrun(handler: Handler, tasks: Sequence[Task], returned: Any, error: BaseException | None) -> None:
    """Tell receivers that the handler has returned or raised. `state` says what that means for the task."""
    if task_postrun.receivers:
        is_list = handler.many and isinstance(returned, list | tuple) and len(returned) == len(tasks)
        for place, task in enumerate(tasks):
            result = returned[place] if is_list else None if handler.many else returned
            verdict = result if isinstance(result, Verdict) else error
            state = states.SUCCESS if verdict is None else _state(handler, task, verdict)
            retval = result if error is None else error
            task_postrun.send(**_about(task), retval=retval, state=state)


def send_outcomes(settled: Mapping[Task, Outcome], seconds: Mapping[Task, float] | None = None) -> None:
    """Tell receivers what was committed."""
    if not (task_success.receivers or task_retry.receivers or task_failure.receivers):
        return
    for task, outcome in settled.items():
        match dead_after_last_attempt(task, outcome):
            case Succeeded(written) if task_success.receivers:
                result = None if written is None else json.loads(written)
                runtime = (seconds or NO_SECONDS).get(task)
                task_success.send(sender=Sender.of(task), task_id=str(task.id), result=result, runtime=runtime)
            case Retry(failure) if task_retry.receivers:
                sender, error = Sender.of(task), _error(failure)
                more = {"request": sender.request, "reason": error, "einfo": _with_traceback(error)}
                task_retry.send(sender=sender, task_id=sender.request.id, **more)
            case Dead(failure) if task_failure.receivers:
                error = _error(failure)
                more = {"exception": error, "einfo": _with_traceback(error), "traceback": error.__traceback__}
                about = _about(task)
                del about["task"]
                task_failure.send(**about, **more)


def _about(task: Task) -> dict[str, Any]:
    sender = Sender.of(task)
    return {"sender": sender, "task_id": sender.request.id, "task": sender, "args": (), "kwargs": {}}


def _state(handler: Handler, task: Task, error: BaseException) -> str:
    outcome = decide(error, Situation(handler))
    if isinstance(outcome, Retry):
        outcome = dead_after_last_attempt(task, outcome)
    return _STATES.get(type(outcome), states.RETRY)


def _error(failure: Failure) -> BaseException:
    return failure.raised.error or WorkerLostError(failure.message)


def _with_traceback(error: BaseException) -> ExceptionInfo:
    if error.__traceback__ is None:  # it was not raised: the handler returned it, or its process was lost
        with suppress(BaseException):
            raise error
    return ExceptionInfo((type(error), error, error.__traceback__))
