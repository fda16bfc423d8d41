"""Measure what operators ask for most often, in a ledger with many tasks: a scrape, `stats`, and a page of `tasks`.

Each figure is the time that PostgreSQL spends on the statements of one call, and the time of the whole call, as the
median of several.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import event

from bench.large_ledger import fill
from bench.scratch import scratch_servers
from models.engine import engine
from receipts.stream_metrics import read_streams
from tally.fold import fold
from tasks.operations.installation_metrics import exposition
from tasks.operations.listing import TaskFilter, list_tasks
from tasks.operations.stats import read_stats

CALLS: Final = 9


@dataclass(frozen=True, slots=True)
class Measured:
    """The time of one call in seconds: in PostgreSQL, and in all."""

    name: str
    database: float
    whole: float


def measure(*, tasks: int, events: int, tally: int, say: Callable[[str], None]) -> list[Measured]:
    """Fill a temporary ledger and call each function several times."""
    with scratch_servers():
        try:
            fill(tasks=tasks, events=events, tally=tally, say=say)
            found = [
                _median("scrape of /metrics", lambda: exposition(read_streams)),
                _median("stats", lambda: _with_connection(read_stats)),
                _median("tasks, first page", lambda: _with_connection(lambda c: list_tasks(c, TaskFilter()))),
            ]
            began_at = time.perf_counter()
            fold(engine(), budget_seconds=60)
            return [*found, Measured("folding that minute", (took := time.perf_counter() - began_at), took)]
        finally:
            engine().dispose()


def _with_connection(function: Callable[[Any], object]) -> None:
    with engine().connect() as connection:
        function(connection)


def _median(name: str, call: Callable[[], object]) -> Measured:
    call()  # connects and prepares
    runs = []
    for _ in range(CALLS):
        with _database_time() as spent:
            began_at = time.perf_counter()
            call()
            whole = time.perf_counter() - began_at
        runs.append((sum(spent), whole))
    return Measured(name, statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs))


@contextmanager
def _database_time() -> Iterator[list[float]]:
    """Collect the seconds of each statement, from when it is sent until its answer is there."""
    spent: list[float] = []
    started_at = 0.0

    def before(*_: Any) -> None:
        nonlocal started_at
        started_at = time.perf_counter()

    def after(*_: Any) -> None:
        spent.append(time.perf_counter() - started_at)

    event.listen(engine(), "before_cursor_execute", before)
    event.listen(engine(), "after_cursor_execute", after)
    try:
        yield spent
    finally:
        event.remove(engine(), "before_cursor_execute", before)
        event.remove(engine(), "after_cursor_execute", after)
