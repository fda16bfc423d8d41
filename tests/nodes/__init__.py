"""Processes of this machine in the place of pytest-celery's containers: its fixtures need no Docker engine."""
