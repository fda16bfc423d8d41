"""Processes of this machine in the place of pytest-celery's containers: its fixtures drive them without a Docker engine."""
