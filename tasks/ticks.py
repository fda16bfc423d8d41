"""Run the periodic work of the ledger: relay, reclaim, tally, prune and schedules.

A tick is called by beat, by `manage.py … --once`, by a worker while beat is silent, or by the API (API_RUN_TICKS). Its
row in the ledger lets one process run it at a time. Each tick has a time budget and is harmless when it is called too
often (docs/protocol.md, Ticks).
"""

from __future__ import annotations

import os
import time
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
from tally.fold import fold, forget_periods
from tasks import broker
from tasks.core.holders import actor
from tasks.core.tick_intervals import intervals
from tasks.operations import backlog, dead_letter_queue
from tasks.recovery import expired_tasks, limited_tasks, lost_wakeups, prune
from tasks.recovery.reclaim import reclaim_leases
from tasks.recovery.tick_rows import BEAT, record_tick, single_flight
from tasks.submission import occurrences

RECLAIM: Final = "reclaim"
RELAY_BUDGET_SECONDS: Final = 10.0
PRUNE_BUDGET_SECONDS: Final = 5.0
TALLY_BUDGET_SECONDS: Final = 5.0
SCHEDULES_BUDGET_SECONDS: Final = 5.0


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
        metrics.TICKS_TOTAL.labels(name, "error").inc()
        if is_outage(error):
            _met_an_outage.add(os.getpid())
        raise
    metrics.TICKS_TOTAL.labels(name, "ok").inc()
    if name == RECLAIM:
        _met_an_outage.discard(os.getpid())
    return result


def record_beat(holder: str) -> None:
    """Record that beat is alive: it cannot be asked."""
    with engine().begin() as connection:
        record_tick(connection, BEAT, holder=holder)
    metrics.TICKS_TOTAL.labels(BEAT, "ok").inc()


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
        result["expired"] = expired_tasks.discard_expired(engine(), current)
    finally:  # a lease that cannot be reclaimed must not delay lost wake-ups
        how: dict[str, Any] = {"depths": broker.depths, "lost": _lost(current)}
        result["wokenAgain"] = lost_wakeups.repair(engine(), current, **how)
        result["wokenAgain"] += limited_tasks.repair(engine(), current, **how)
        result["backlogAlerts"] = backlog.check_backlog(engine(), current)
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
    periods = forget_periods(engine())
    return {"events": events, "tasks": tasks.tasks, "letters": letters, "keys": keys, "periods": periods}


def _tally() -> int:
    return fold(engine(), budget_seconds=TALLY_BUDGET_SECONDS)


def _schedules() -> dict[str, int]:
    return asdict(occurrences.submit_due(engine(), budget_seconds=SCHEDULES_BUDGET_SECONDS))


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
    "tally": (_tally, 60.0),
    "prune": (_prune, 60.0),
    "schedules": (_schedules, 4 * SCHEDULES_BUDGET_SECONDS),
}


class DueTicks:
    """When a process that is not beat runs which tick: each at its interval, all of them at first."""

    def __init__(self) -> None:
        self._due_at = dict.fromkeys(TICKS, 0.0)

    def run_due(self) -> bool:
        """Run the ticks that are due. Return False if none is.

        An error in one does not prevent the others; the first error is raised.
        """
        if self.next_in_seconds() > 0:
            return False
        errors: list[Exception] = []
        for name, due_at in self._due_at.items():
            if time.monotonic() >= due_at:
                self._due_at[name] = time.monotonic() + intervals()[name]
                try:
                    run(name)
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]
        return True

    def next_in_seconds(self) -> float:
        """Return how long it takes until a tick is due."""
        return max(0.0, min(self._due_at.values()) - time.monotonic())
