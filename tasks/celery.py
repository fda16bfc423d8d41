"""The Celery application: `celery -A tasks worker | beat | flower | inspect …`.

Everything that Celery can be told is in `celeryconfig.py`; here is only what must happen in code, around it.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import billiard.common
import celery.app.control
from celery import Celery, signals

import metrics
import settings
from models.engine import forget_inherited_connections
from tasks.first_words import a_sentence_for_whoever_typed
from tasks.logs import configure_logging

logger = logging.getLogger(__name__)


def _give_work_back_on_sigterm() -> None:
    """SIGTERM as Celery's cold shutdown: messages in hand go back at once instead of being worked off.

    billiard reads the variable when it is imported, and the `celery` program has done that, and copied the value into
    other modules, before this line. A copy left behind would send the children a SIGTERM that they ignore.
    """
    if "REMAP_SIGTERM" in os.environ:
        return
    os.environ["REMAP_SIGTERM"] = "SIGQUIT"
    importlib.reload(billiard.common)
    importlib.reload(celery.app.control)  # has it in default arguments
    for module in ("celery.worker.control", "celery.worker.request"):
        if module in sys.modules:
            sys.modules[module].TERM_SIGNAME = billiard.common.TERM_SIGNAME  # type: ignore[attr-defined]


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


def _make_app() -> Celery:
    application = Celery("celeriac")
    application.config_from_object("celeryconfig", force=True)
    return application


_give_work_back_on_sigterm()
with a_sentence_for_whoever_typed():
    app = _make_app()
    _close_flower()


@signals.worker_ready.connect
@signals.beat_init.connect
def _say_ready(**_: Any) -> None:
    if path := os.environ.get("CELERIAC_READY_FILE"):
        Path(path).touch()


@signals.worker_init.connect
def _require_ledger(**_: Any) -> None:
    """A worker without one would fail every task, and acknowledge it."""
    with a_sentence_for_whoever_typed():
        assert settings.current().database_url


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
