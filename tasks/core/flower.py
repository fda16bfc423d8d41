"""Flower: closed to strangers, with the columns that matter, and with all queues on its Broker page.

Flower is a subcommand of the `celery` program. It reads `flowerconfig.py` from the current folder only, so its options
are set as variables, before it reads them.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, Final

import settings
from tasks.core.logs import configure_logging

# Arguments and results are never shown; the error and the number of retries are.
COLUMNS: Final = "name,uuid,state,retries,exception,received,runtime,worker"


def prepare_flower() -> None:
    """Make Flower listen on loopback and ask for a login, unless its own variables or options say otherwise."""
    ours = {"FLOWER_ADDRESS": "127.0.0.1", "FLOWER_TASKS_COLUMNS": COLUMNS}
    if secret := settings.current().secrets.get("flower"):
        ours["FLOWER_BASIC_AUTH"] = f"celeriac:{secret}"
    for variable, value in ours.items():
        os.environ[variable] = os.environ.get(variable) or value  # an empty one would open it
    if "flower" in sys.argv:
        if not _has_a_login():
            raise settings.SettingsError("Flower would be open to everyone: set FLOWER_BASIC_AUTH=user:password.")
        configure_logging(logging.WARNING)  # Tornado adds no handler of its own then, and sets the level
        _show_all_queues()


def _has_a_login() -> bool:
    options = ("--basic-auth", "--basic_auth", "--auth")
    return any(map(os.environ.get, ("FLOWER_BASIC_AUTH", "FLOWER_AUTH"))) or any(
        argument.startswith(options) for argument in sys.argv
    )


def _show_all_queues() -> None:
    """Add to the Broker page the dead-letter queue, which no worker consumes, and queues that no worker consumes now.

    Flower shows the queues of the workers that it has seen, and has no option for more.
    """
    from flower.views import BaseHandler  # type: ignore[import-untyped]  # noqa: PLC0415 - not needed by workers

    consumed = BaseHandler.get_active_queue_names

    def names(self: Any) -> list[str]:
        declared = {queue.name for queue in self.capp.conf.task_queues}
        current = settings.current()
        dead_letters = {current.broker_queue(current.ingest_dlq_queue)} if current.ingest_dlq_queue else set()
        return sorted({*consumed(self), *declared, *dead_letters})

    BaseHandler.get_active_queue_names = names
