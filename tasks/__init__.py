"""The work of Celeriac on Celery. `celery -A tasks` finds the application in `tasks/celery.py`.

from tasks import handler, submit, Permanent, Snooze
"""

from tasks.program import give_work_back_on_sigterm

give_work_back_on_sigterm()  # first of all: a worker begins once more here, and half of its start is not done twice

from tasks.envelope import NewTask  # noqa: E402
from tasks.outcomes import Discard, Finish, LeaseLost, Permanent, Snooze, TryLater  # noqa: E402
from tasks.registry import handler  # noqa: E402
from tasks.submit import IdempotencyConflict, Submitted, submit, submit_many  # noqa: E402
from tasks.task import Task  # noqa: E402

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
