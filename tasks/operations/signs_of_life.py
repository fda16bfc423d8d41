"""When each worker and each tick gave its last sign of life, as the ledger knows it. No process is asked."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import Connection

from models.sql import sql
from tasks.core.registered_types import IS_LIVE
from tasks.core.tick_intervals import BEAT_SEEN_SECONDS, intervals
from tasks.recovery.tick_rows import BEAT

MISSED: Final = 4  # signs of life in a row; `manage.py check` and the watch of a worker use the same number
LATE_SECONDS: Final = 20.0  # ticks that run every second are given as much time as beat

WORKERS: Final = sql(f"""
    SELECT worker, queues, cardinality(types), processes, (SELECT ledger.ledger_now()) - started_at,
           (SELECT ledger.ledger_now()) - seen_at
    FROM ledger.task_worker WHERE {IS_LIVE} ORDER BY worker
""")
TICKS: Final = sql("SELECT name, (SELECT ledger.ledger_now()) - finished_at, error FROM ledger.tick")


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """A worker that has given a sign of life lately."""

    worker: str
    queues: list[str]
    types: int  # that it has handlers for
    processes: int | None  # None if its pool cannot be changed, or is not known yet
    uptime: timedelta
    seen: timedelta  # ago


@dataclass(frozen=True, slots=True)
class TickLife:
    """Beat, or a tick: when it last ended, and the error of that run."""

    name: str
    seen: timedelta | None  # ago; None if it never ran
    error: str | None
    is_late: bool


def read_workers(connection: Connection) -> list[WorkerLife]:
    return [WorkerLife(*row) for row in connection.execute(WORKERS)]


def read_ticks(connection: Connection) -> list[TickLife]:
    """Return beat and every tick, also those that have never run."""
    found = {name: (seen, error) for name, seen, error in connection.execute(TICKS)}
    expected = {BEAT: BEAT_SEEN_SECONDS, **intervals()}
    return [
        TickLife(name, seen, error, seen is None or seen.total_seconds() > max(MISSED * every, LATE_SECONDS))
        for name, every in expected.items()
        for seen, error in [found.get(name, (None, None))]
    ]
