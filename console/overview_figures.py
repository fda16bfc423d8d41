"""Read what the overview shows, from the ledger and from the receipt log. Nothing here asks the broker or a worker."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import settings
from models.clock import now
from models.engine import engine
from outbox.backlog import Backlog, backlog
from receipts.errors import ReceiptLogUnreachable
from receipts.shard_states import read_shards
from receipts.switches import read_switches
from sinks import transactions
from tally.totals import Pace, has_counted_tasks, read_pace
from tasks.core.registered_types import unhandled_kinds
from tasks.operations.backlog import Alert, read_alerts
from tasks.operations.inserted_rows import Inserted, read_inserted
from tasks.operations.pauses import QueuePause, read_pauses
from tasks.operations.signs_of_life import TickLife, WorkerLife, read_ticks, read_workers
from tasks.operations.stats import Stats, read_stats

LOG_SECONDS: Final = 1.0  # patience with the receipt log


@dataclass(frozen=True, slots=True)
class InDoubt:
    """The unfinished transactions of one sink."""

    sink: str
    count: int
    oldest: timedelta | None


@dataclass(frozen=True, slots=True)
class Accepted:
    """Entries of the receipt log that wait to be saved."""

    waiting: int
    oldest_seconds: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The state of the installation at one moment."""

    at: datetime
    stats: Stats
    unhandled: list[tuple[str, str]]  # queues and types of waiting tasks that no live worker can run
    backlog: list[Backlog]
    pauses: list[QueuePause]
    alerts: dict[str, Alert]
    sinks: list[InDoubt]
    workers: list[WorkerLife]
    ticks: list[TickLife]
    pace: list[Pace]
    inserted: Inserted
    has_history: bool  # a task was delivered at some time
    takes_receipts: bool  # messages are accepted before they are saved
    accepted: Accepted | None = None  # None if the receipt log does not answer

    @property
    def is_empty(self) -> bool:
        """Return whether no task was ever submitted, as far as the ledger remembers."""
        has_tasks = any(each.count for each in self.stats.statuses)
        return not (has_tasks or self.has_history or (self.accepted and self.accepted.waiting))


def read_figures() -> Figures:
    """Read everything that the ledger knows."""
    current = settings.current()
    with engine().connect() as connection:
        unfinished = transactions.unfinished(connection)
        destinations = {each.destination: each for each in backlog(connection)}
        for name in current.outbox_destinations:
            destinations.setdefault(name, Backlog(name))
        ages = {name: [row.age for row in unfinished if row.sink == name] for name in current.sinks}
        for row in unfinished:
            ages.setdefault(row.sink, []).append(row.age)
        return Figures(
            at=now(connection),
            stats=read_stats(connection),
            unhandled=unhandled_kinds(connection),
            backlog=sorted(destinations.values(), key=lambda each: each.destination),
            pauses=list(read_pauses(connection)),
            alerts=read_alerts(connection),
            sinks=[InDoubt(name, len(found), max(found, default=None)) for name, found in sorted(ages.items())],
            workers=read_workers(connection),
            ticks=read_ticks(connection),
            pace=read_pace(connection),
            inserted=read_inserted(connection),
            has_history=has_counted_tasks(connection),
            takes_receipts=read_switches(connection).two_phase,
        )


def read_accepted() -> Accepted | None:
    """Read what waits in the receipt log; None if it does not answer."""
    try:
        shards = read_shards(answer_seconds=LOG_SECONDS)
    except (ReceiptLogUnreachable, settings.SettingsError):
        return None
    return Accepted(sum(shard.length for shard in shards), max((shard.lag_seconds for shard in shards), default=0.0))
