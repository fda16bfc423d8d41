"""The work of Celeriac on Celery. `celery -A tasks` finds the application in `tasks/celery.py`.

from tasks import handler, submit, Permanent, Snooze
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
