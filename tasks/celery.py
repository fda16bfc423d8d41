"""The Celery application: `celery -A tasks worker | beat | flower | inspect …`.

Everything that Celery can be told is in `celeryconfig.py`; here is only what must happen in code, around it.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from celery import Celery, signals

import metrics
import settings
from models.engine import forget_inherited_connections
from models.readiness import require_ready
from tasks.first_words import a_sentence_for_whoever_typed, is_celery_program
from tasks.logs import configure_logging

logger = logging.getLogger(__name__)


def _give_work_back_on_sigterm() -> None:
    """SIGTERM as Celery's cold shutdown: messages in hand go back at once instead of being worked off.

    Celery copies this variable into several modules while it is imported, which has happened before this line; so a
    worker that was started without it begins once more with it.
    """
    if "worker" in sys.argv and "REMAP_SIGTERM" not in os.environ:
        os.environ["REMAP_SIGTERM"] = "SIGQUIT"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - the same command


def _close_flower() -> None:
    """Flower on loopback with a login, from whatever folder it is started; its own variables and options still win."""
    ours = {"FLOWER_ADDRESS": "127.0.0.1"}
    if secret := settings.current().secrets.get("flower"):
        ours["FLOWER_BASIC_AUTH"] = f"celeriac:{secret}"
    for variable, value in ours.items():
        os.environ[variable] = os.environ.get(variable) or value  # an empty one would open it
    if "flower" in sys.argv and not _flower_has_a_login():
        raise settings.SettingsError("Flower would be open to anyone: set FLOWER_BASIC_AUTH=user:password.")


def _flower_has_a_login() -> bool:
    options = ("--basic-auth", "--basic_auth", "--auth")
    return any(map(os.environ.get, ("FLOWER_BASIC_AUTH", "FLOWER_AUTH"))) or any(
        argument.startswith(options) for argument in sys.argv
    )


app = Celery("celeriac")
app.config_from_object("celeryconfig")  # read when it is first needed: importing this module needs no broker
if is_celery_program():
    _give_work_back_on_sigterm()
    with a_sentence_for_whoever_typed():
        _close_flower()
        assert app.conf.broker_url


@signals.worker_ready.connect
@signals.beat_init.connect
def _say_ready(**_: Any) -> None:
    if path := os.environ.get("CELERIAC_READY_FILE"):
        Path(path).touch()


@signals.worker_init.connect
def _require_ledger(**_: Any) -> None:
    """A worker without one, or with a schema of yesterday, would fail every task, and acknowledge it."""
    with a_sentence_for_whoever_typed():
        require_ready(newer_is_ready=True)


@signals.worker_init.connect
def _serve_metrics(**_: Any) -> None:
    if port := settings.current().worker_metrics_port:
        metrics.serve(port)


@signals.worker_process_init.connect
def _start_child(**_: Any) -> None:
    forget_inherited_connections()


@signals.setup_logging.connect
def _configure_logging(loglevel: int | str | None = None, **_: Any) -> None:
    configure_logging(loglevel or logging.WARNING)
