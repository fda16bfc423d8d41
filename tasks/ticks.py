"""The ticks: what must happen again and again, whoever calls it: beat, `--once`, or a worker when beat is silent (P24).

Each runs once at a time, by its row in the ledger, has a time budget, and is harmless when it is called too often.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import metrics
import settings
from models.engine import engine
from outbox import prune as outbox_prune
from outbox.relay import Relay
from tasks import broker
from tasks.core.holders import actor
from tasks.operations import dead_letter_queue
from tasks.recovery import lost_wakeups, prune
from tasks.recovery.reclaim import take_over
from tasks.recovery.tick_rows import BEAT, record_tick, single_flight

RELAY_BUDGET_SECONDS: Final = 10.0
PRUNE_BUDGET_SECONDS: Final = 5.0


def run(name: str) -> Any:
    """Run a tick, unless it runs elsewhere; returns what it found, or None."""
    try:
        tick, longest_seconds = TICKS[name]
        with single_flight(engine(), name, holder=actor(), seconds=longest_seconds) as ours:
            found = tick() if ours else None
    except Exception:
        metrics.TICK_TOTAL.labels(name, "error").inc()
        raise
    metrics.TICK_TOTAL.labels(name, "ok").inc()
    return found


def record_beat(holder: str) -> None:
    """Beat itself cannot be asked whether it lives: this row says so."""
    with engine().begin() as connection:
        record_tick(connection, BEAT, holder=holder)
    metrics.TICK_TOTAL.labels(BEAT, "ok").inc()


def _relay() -> Any:
    return relay_of_this_process().tick(RELAY_BUDGET_SECONDS)


def _reclaim() -> dict[str, Any]:
    current = settings.current()
    found: dict[str, Any] = {}
    try:
        if current.ingest_reclaim_enabled:
            reclaimed = take_over(engine(), current)
            found |= {"leases": reclaimed.leases, "charged": reclaimed.charged, "isolated": reclaimed.isolated}
    finally:  # what is wrong with a lease says nothing about wake-ups
        found["wokenAgain"] = _wake_again(current)
    return found


def _wake_again(current: settings.Settings) -> int:
    lost: lost_wakeups.Lost | None = None
    if current.ingest_queue == "kafka":
        from tasks.kafka import lag  # noqa: PLC0415 - loads Kafka's client

        lost = lag.lost
    return lost_wakeups.wake_again(engine(), current, depths=broker.depths, lost=lost)


def _prune() -> dict[str, int]:
    current = settings.current()
    events = outbox_prune.prune(
        engine(), hours=current.outbox_sent_retention_hours, budget_seconds=PRUNE_BUDGET_SECONDS
    )
    tasks = prune.prune(engine(), current, budget_seconds=PRUNE_BUDGET_SECONDS)
    letters = dead_letter_queue.sync(engine(), current, depths=broker.depths, purge=broker.purge)
    return {"events": events.events, "tasks": tasks.tasks, "letters": letters}


def relay_of_this_process() -> Relay:
    """The relay of this process and its settings. A child does not use its parent's."""
    current = settings.current()
    if _relays.get(os.getpid()) is None or _relays[os.getpid()].settings is not current:
        if os.getpid() in _relays:
            _relays[os.getpid()].close()
        _relays[os.getpid()] = Relay.of(current)
    return _relays[os.getpid()]


_relays: Final[dict[int, Relay]] = {}


# Each with the time after which one that was lost with its process may be run by another.
TICKS: Final[dict[str, tuple[Callable[[], Any], float]]] = {
    "relay": (_relay, 2 * RELAY_BUDGET_SECONDS),
    "reclaim": (_reclaim, 60.0),
    "prune": (_prune, 60.0),
}
