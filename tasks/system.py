"""Celery wrappers of the ticks that beat sends to the `system` queue: each calls one function and counts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from celery import Task

import metrics
from models.engine import engine
from tasks.celery import app
from tasks.ticks import record_tick

BEAT: Final = "beat"


@app.task(name="tasks.beat_seen", bind=True)
def beat_seen(self: Task[[], None]) -> None:
    """Beat, the broker and a system worker are alive, and the ledger knows it: `manage.py check` reads this."""
    holder = str(self.request.hostname or "")
    _counted(BEAT, lambda: _record_beat(holder))


def _record_beat(holder: str) -> None:
    with engine().begin() as connection:
        record_tick(connection, BEAT, holder=holder)


def _counted(name: str, tick: Callable[[], None]) -> None:
    try:
        tick()
    except Exception:
        metrics.TICK_TOTAL.labels(name, "error").inc()
        raise
    metrics.TICK_TOTAL.labels(name, "ok").inc()
