"""The Celery application: `celery -A tasks worker | beat | flower | inspect …`.

All settings of Celery are in `celeryconfig.py`. What a worker does when it starts is in `tasks/worker.py`.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from celery import Celery, signals

from tasks.core.celery_program import exit_with_message, is_celery_program
from tasks.core.flower import prepare_flower
from tasks.core.logs import configure_logging

app = Celery("celeriac")
app.config_from_object("celeryconfig")  # read when it is first needed: importing this module needs no broker
if is_celery_program() and "--help" not in sys.argv:
    with exit_with_message():
        prepare_flower()
        _ = app.conf.broker_url  # reads the settings now, so that a wrong one is reported before anything starts


@signals.worker_ready.connect
@signals.beat_init.connect
def _say_ready(**_: Any) -> None:
    if path := os.environ.get("CELERIAC_READY_FILE"):
        Path(path).touch()


@signals.setup_logging.connect
def _configure_logging(loglevel: int | str | None = None, **_: Any) -> None:
    configure_logging(loglevel or logging.WARNING)
