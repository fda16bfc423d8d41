"""Local processes instead of pytest-celery's containers, so that its fixtures need no Docker engine."""
