"""Exactly-once tasks on Celery and PostgreSQL: the names that handlers and submitters need.

    from tasks import handler, submit, Permanent, Snooze

The functions for results (`get`, `wait`, `cancel`, `requeue`) and their errors are imported when they are first used:
they need modules that import this package themselves.

`celery -A tasks` finds the Celery application in `tasks/celery.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from models.errors import LeaseLost
from tasks.core.outcomes import Discard, Finish, Permanent, Snooze, TryLater
from tasks.core.registry import handler
from tasks.core.task import Task
from tasks.submission.closed_queues import BacklogFull, QueueClosed, QueuePaused
from tasks.submission.envelope import NewTask
from tasks.submission.submit import IdempotencyConflict, Submitted, submit, submit_many

if TYPE_CHECKING:
    from tasks.operations.discard import AlreadyDone
    from tasks.operations.listing import UnknownTask
    from tasks.operations.results import TaskResult, WaitTimeout, cancel, get, requeue, wait
    from tasks.operations.retry_now import NotDead
    from tasks.operations.sink_effects import KeysForgotten

__all__ = [
    "AlreadyDone",
    "BacklogFull",
    "Discard",
    "Finish",
    "IdempotencyConflict",
    "KeysForgotten",
    "LeaseLost",
    "NewTask",
    "NotDead",
    "Permanent",
    "QueueClosed",
    "QueuePaused",
    "Snooze",
    "Submitted",
    "Task",
    "TaskResult",
    "TryLater",
    "UnknownTask",
    "WaitTimeout",
    "cancel",
    "get",
    "handler",
    "requeue",
    "submit",
    "submit_many",
    "wait",
]

_LATER = {
    "AlreadyDone": "discard",
    "KeysForgotten": "sink_effects",
    "NotDead": "retry_now",
    "TaskResult": "results",
    "UnknownTask": "listing",
    "WaitTimeout": "results",
    "cancel": "results",
    "get": "results",
    "requeue": "results",
    "wait": "results",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"tasks.operations.{_LATER[name]}"), name)
