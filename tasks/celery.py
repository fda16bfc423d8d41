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
from celery import Celery, signals

import metrics
import settings
from models.engine import forget_inherited_connections
from tasks.logs import configure_logging

logger = logging.getLogger(__name__)


def _give_work_back_on_sigterm() -> None:
    """SIGTERM as Celery's cold shutdown: messages in hand go back at once instead of being worked off.

    billiard reads the variable when it is imported, which Flower's plug-in has done before this line; whoever uses the
    value imports it later.
    """
    if "REMAP_SIGTERM" not in os.environ:
        os.environ["REMAP_SIGTERM"] = "SIGQUIT"
        importlib.reload(billiard.common)


def _close_flower() -> None:
    """Flower on loopback with a login, from whatever folder it is started; its own variables and options still win."""
    os.environ.setdefault("FLOWER_ADDRESS", "127.0.0.1")
    if secret := settings.current().secrets.get("flower"):
        os.environ.setdefault("FLOWER_BASIC_AUTH", f"celeriac:{secret}")
    if "flower" in sys.argv and not any(name in os.environ for name in ("FLOWER_BASIC_AUTH", "FLOWER_AUTH")):
        _exit(settings.SettingsError("Flower would be open to anyone: set FLOWER_BASIC_AUTH=user:password."))


def _forget_printed_broker() -> None:
    """Celery's -b option reads BROKER_URL: what `manage.py env` printed earlier must not win over the running stack."""
    if not settings.current().given("BROKER_URL"):
        for variable in ("BROKER_URL", "CELERY_BROKER_URL"):
            os.environ.pop(variable, None)


def _exit(error: settings.SettingsError) -> None:
    """A sentence instead of a traceback, for whoever typed `celery …`."""
    if Path(sys.argv[0]).stem in ("celery", "__main__"):
        print(f"celery: {error.message}", file=sys.stderr)  # noqa: T201
        raise SystemExit(error.exit_code)
    raise error


def _make_app() -> Celery:
    application = Celery("celeriac")
    try:
        _forget_printed_broker()
        application.config_from_object("celeryconfig", force=True)
    except settings.SettingsError as error:
        _exit(error)
    return application


_give_work_back_on_sigterm()
app = _make_app()
_close_flower()


@signals.worker_ready.connect
@signals.beat_init.connect
def _say_ready(**_: Any) -> None:
    if path := os.environ.get("CELERIAC_READY_FILE"):
        Path(path).touch()


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
