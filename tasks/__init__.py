"""Exactly-once tasks on Celery and PostgreSQL: the names that handlers and submitters need.

    from tasks import handler, submit, Permanent, Snooze

`celery -A tasks` finds the Celery application in `tasks/celery.py`.
"""

from models.errors import LeaseLost
from tasks.core.outcomes import Discard, Finish, Permanent, Snooze, TryLater
from tasks.core.registry import handler
from tasks.core.task import Task
from tasks.submission.envelope import NewTask
from tasks.submission.submit import IdempotencyConflict, Submitted, submit, submit_many

__all__ = [
    "Discard",
    "Finish",
    "IdempotencyConflict",
    "LeaseLost",
    "NewTask",
    "Permanent",
    "Snooze",
    "Submitted",
    "Task",
    "TryLater",
    "handler",
    "submit",
    "submit_many",
]
