"""The work of Celeriac on Celery. `celery -A tasks` finds the application in `tasks/celery.py`."""

from tasks.program import give_work_back_on_sigterm

give_work_back_on_sigterm()  # first of all: a worker begins once more here, and half of its start is not done twice
