"""The work of Celeriac on Celery. `celery -A tasks` finds the application in `tasks/celery.py`."""
