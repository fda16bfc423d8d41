"""Celery wrappers of the ticks that beat sends to the `system` queue: each calls one function and counts it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final

from celery import Task

import metrics
import settings
from models.engine import engine
from outbox.prune import prune
from outbox.relay import Relay
from tasks.celery import app
from tasks.ticks import record_tick, single_flight

BEAT: Final = "beat"
RELAY_BUDGET_SECONDS: Final = 10.0
PRUNE_BUDGET_SECONDS: Final = 5.0


@app.task(name="tasks.beat_seen", bind=True)
def beat_seen(self: Task[[], None]) -> None:
    """Beat, the broker and a system worker are alive, and the ledger knows it: `manage.py check` reads this."""
    holder = str(self.request.hostname or "")
    _counted(BEAT, lambda: _record_beat(holder))


@app.task(name="outbox.relay")
def relay() -> None:
    """One tick of the relay, unless another one is under way."""
    _counted("relay", _tick_relay)


@app.task(name="outbox.prune")
def prune_outbox() -> None:
    """SENT events whose retention is over go away, in small batches."""
    _counted("outbox-prune", _tick_prune)


def _tick_prune() -> None:
    with single_flight(engine(), "outbox-prune", holder=_relay().worker_id, seconds=2 * PRUNE_BUDGET_SECONDS) as ours:
        if ours:
            hours = settings.current().outbox_sent_retention_hours
            prune(engine(), hours=hours, budget_seconds=PRUNE_BUDGET_SECONDS)


def _tick_relay() -> None:
    relay = _relay()
    with single_flight(engine(), "relay", holder=relay.worker_id, seconds=2 * RELAY_BUDGET_SECONDS) as ours:
        if ours:
            relay.tick(RELAY_BUDGET_SECONDS)


@cache
def _relay() -> Relay:
    """The relay of this process. It is made in the child that runs ticks, never before the fork."""
    return Relay.of(settings.current())


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
