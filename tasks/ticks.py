"""Run the periodic work of the ledger: relay, reclaim and prune.

A tick is called by beat, by `manage.py … --once`, or by a worker while beat is silent. Its row in the ledger lets one
process run it at a time. Each tick has a time budget and is harmless when it is called too often (docs/protocol.md,
Ticks).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import metrics
import settings
from models.engine import engine
from models.ledger_outage import is_outage
from outbox import prune as outbox_prune
from outbox.relay import Relay
from sinks.recovery import prune_keys, recover
from tasks import broker
from tasks.core.holders import actor
from tasks.operations import dead_letter_queue
from tasks.recovery import lost_wakeups, prune
from tasks.recovery.reclaim import reclaim_leases
from tasks.recovery.tick_rows import BEAT, record_tick, single_flight

RECLAIM: Final = "reclaim"
RELAY_BUDGET_SECONDS: Final = 10.0
PRUNE_BUDGET_SECONDS: Final = 5.0


def run(name: str) -> Any:
    """Run a tick and return its result, or None if another process runs it.

    The first tick after an outage of the ledger also runs reclaim: wake-ups were probably lost, and the next reclaim of
    beat may be seconds away.
    """
    result = _run(name)
    if name != RECLAIM and os.getpid() in _met_an_outage:
        _run(RECLAIM)
    return result


def _run(name: str) -> Any:
    try:
        tick, longest_seconds = TICKS[name]
        with single_flight(engine(), name, holder=actor(), seconds=longest_seconds) as ours:
            result = tick() if ours else None
    except Exception as error:
        metrics.TICK_TOTAL.labels(name, "error").inc()
        if is_outage(error):
            _met_an_outage.add(os.getpid())
        raise
    metrics.TICK_TOTAL.labels(name, "ok").inc()
    if name == RECLAIM:
        _met_an_outage.discard(os.getpid())
    return result


def record_beat(holder: str) -> None:
    """Record that beat is alive: it cannot be asked."""
    with engine().begin() as connection:
        record_tick(connection, BEAT, holder=holder)
    metrics.TICK_TOTAL.labels(BEAT, "ok").inc()


def _relay() -> Any:
    return relay_of_this_process().tick(RELAY_BUDGET_SECONDS)


def _reclaim() -> dict[str, Any]:
    current = settings.current()
    result: dict[str, Any] = {}
    try:
        if current.ingest_reclaim_enabled:
            result |= asdict(reclaim_leases(engine(), current))
        if current.sinks:
            found = recover(engine())
            result |= {"sinkCommits": len(found.committed), "sinkAborts": len(found.aborted)}
    finally:  # a lease that cannot be reclaimed must not delay lost wake-ups
        result["wokenAgain"] = lost_wakeups.repair(engine(), current, depths=broker.depths, lost=_lost(current))
    return result


def _lost(current: settings.Settings) -> lost_wakeups.Lost | None:
    if current.ingest_queue != "kafka":
        return None
    from tasks.kafka import lag  # noqa: PLC0415 - loads Kafka's client

    return lag.lost


def _prune() -> dict[str, int]:
    current, budget = settings.current(), PRUNE_BUDGET_SECONDS
    events = outbox_prune.prune(engine(), hours=current.outbox_sent_retention_hours, budget_seconds=budget)
    tasks = prune.prune(engine(), current, budget_seconds=budget)
    letters = dead_letter_queue.sync(engine(), current)
    keys = prune_keys(engine()) if current.sinks else 0
    return {"events": events, "tasks": tasks.tasks, "letters": letters, "keys": keys}


def relay_of_this_process() -> Relay:
    """Return the relay of this process, a new one if the settings have changed."""
    current, pid = settings.current(), os.getpid()
    if pid not in _relays or _relays[pid].settings is not current:
        if pid in _relays:
            _relays[pid].close()
        _relays[pid] = Relay.of(current)
    return _relays[pid]


_met_an_outage: Final[set[int]] = set()  # pids of processes that have not run reclaim since an outage of the ledger
# By pid: a forked child must neither use nor free the connections of its parent's relay.
_relays: Final[dict[int, Relay]] = {}

# Each tick, and the seconds after which another process may run it if its own process was lost.
TICKS: Final[dict[str, tuple[Callable[[], Any], float]]] = {
    "relay": (_relay, 2 * RELAY_BUDGET_SECONDS),
    RECLAIM: (_reclaim, 60.0),
    "prune": (_prune, 60.0),
}
