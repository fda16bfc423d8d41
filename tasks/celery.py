"""The Celery application: `celery -A tasks worker | beat | flower | inspect …`.

Everything that Celery can be told is in `celeryconfig.py`; here is only what must happen in code, around it.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path
from typing import Any

from celery import Celery, signals

import metrics
import settings
from tasks.actor import WORKER
from tasks.births import Births
from tasks.first_words import a_sentence_for_whoever_typed
from tasks.logs import configure_logging
from tasks.program import is_celery_program

logger = logging.getLogger(__name__)
_births: list[Births] = []  # of this process, if it is a worker


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
if is_celery_program() and "--help" not in sys.argv:
    with a_sentence_for_whoever_typed():
        _close_flower()
        _ = app.conf.broker_url  # reads the settings now


@signals.worker_ready.connect
@signals.beat_init.connect
def _say_ready(**_: Any) -> None:
    if path := os.environ.get("CELERIAC_READY_FILE"):
        Path(path).touch()


@signals.worker_init.connect
def _require_ledger(**_: Any) -> None:
    """A worker without one, or with a schema of yesterday, would fail every task, and acknowledge it."""
    from models.readiness import require_ready  # noqa: PLC0415 - `inspect`, beat and Flower need no ledger
    from tasks.registry import handlers  # noqa: PLC0415

    with a_sentence_for_whoever_typed():
        require_ready(newer_is_ready=True)
        handlers()  # a module that is not there is said now, and not by every task


@signals.worker_init.connect
def _serve_metrics(**_: Any) -> None:
    if port := settings.current().worker_metrics_port:
        metrics.serve(port)


@signals.worker_init.connect
def _expect_children(**_: Any) -> None:
    logger.info("this worker holds leases as %s", WORKER)  # its children inherit that
    _births.append(Births())


@signals.worker_ready.connect
def _start_attendant(sender: Any, **_: Any) -> None:
    """Only where children are processes: a pool of threads dies as a whole."""
    from tasks.attendant import Attendant  # noqa: PLC0415 - as above

    pool, births = sender.pool, _births[-1]
    runs_ticks = "system" in app.amqp.queues.consume_from and settings.current().worker_run_ticks

    def children() -> set[int]:  # one that is about to start has no pid yet
        return {pid for pid in pool.info.get("processes") or () if pid}

    Attendant(children, born=births.heard, runs_ticks=runs_ticks).start()


@signals.worker_process_init.connect
def _start_child(**_: Any) -> None:
    for births in _births:
        births.tell()
    gc.freeze()  # a worker has loaded 100,000 objects, which no collection need look at again


@signals.setup_logging.connect
def _configure_logging(loglevel: int | str | None = None, **_: Any) -> None:
    configure_logging(loglevel or logging.WARNING)
