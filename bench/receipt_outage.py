"""Measure how saving keeps up with accepting: the save lag under steady load, and the drain of a backlog.

The lag is savedAt − acceptedAt of the receipt. savedAt is read inside the transaction, so it is before the commit.

The backlog grows while PostgreSQL is stopped. The load ends right before PostgreSQL starts again, so that the drain and
the bare INSERTs have the same machine to themselves; if the backlog is too small then, `receipt_backlog.py` adds to it.
The drain counts from the first save after the outage to the last, by the ledger's clock.

The bare rate is that of the saver's own INSERTs: the same statements for as many rows, with the same batch size, one
transaction per batch, on one connection of the driver. Their values are prepared beforehand. A second rate is that of
the saver's own code for the same entries, which are in memory: it shows what the streams cost. Neither uses Redis. Both
are measured several times, in turn, and the medians count.

`lost` counts receipts that a client got for tasks that are not saved, `doubled` the tasks that are in the ledger more
than once: each task of a run has a number of its own in its payload.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any, Final

from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from bench.peers.programs import MeasurementFailed
from bench.receipt_backlog import accept_messages, task_message
from bench.receipt_load import ACCEPTED, CREATED, Answer, Load, Target, Waits, at_rate, percentile
from bench.receipt_stack import Stack
from bench.scratch import postgres_stopped, write_checkpoint
from models.driver_values import array_of_ids
from models.engine import make_engine
from models.sql import sql
from receipts import kinds, task_messages
from receipts.streams.entries import Entry

BEFORE_SECONDS: Final = 2.0  # of load before PostgreSQL is stopped
LONGEST_LOAD_SECONDS: Final = 3600.0
TURNS: Final = 3  # of the two rates without a saver
STATEMENTS: Final = ("EXECUTE", "WITH")  # those that insert; the others begin and end transactions
LAGS: Final = sql("""
    SELECT extract(epoch FROM saved_at - accepted_at) FROM ledger.receipt
    WHERE level = 'saved' AND id = ANY(CAST(:ids AS uuid[]))
""")
# drained: since a time, the first and the last save, and how many were saved before the last batch.
DRAINED: Final = sql("""
    WITH saved AS MATERIALIZED (SELECT saved_at FROM ledger.receipt WHERE level = 'saved' AND saved_at >= :since)
    SELECT min(saved_at), max(saved_at), count(*) FILTER (WHERE saved_at < (SELECT max(saved_at) FROM saved)) FROM saved
""")
SAVED: Final = sql("""
    SELECT task.id FROM ledger.ingest_task task JOIN ledger.receipt ON receipt.id = task.id AND level = 'saved'
""")
DOUBLED: Final = sql("""
    SELECT count(*) - count(DISTINCT payload ->> 'n') FROM ledger.ingest_task
    WHERE CAST(payload ->> 'n' AS bigint) >= 0
""")


@dataclass(frozen=True, slots=True)
class Sustained:
    """The save lag at a steady rate."""

    seconds: float
    per_second: float
    accepted: Waits  # until the answer
    lag_p50_seconds: float
    lag_p99_seconds: float


@dataclass(frozen=True, slots=True)
class Outage:
    """What an outage of PostgreSQL under load led to. `received`: receipts `accepted` that the client got."""

    seconds: float
    received: int
    refused: int  # requests without a receipt
    added: int  # to the backlog, without HTTP
    accepted: Waits  # until the answer, from the load before the outage to its end
    backlog: int  # messages that waited when PostgreSQL answered again
    first_save_seconds: float  # from then on
    drain_per_second: float
    bare_per_second: float
    without_redis_per_second: float
    drain_ratio: float  # to the bare rate
    without_redis_ratio: float
    lost: int
    doubled: int


def measure_sustained(stack: Stack, target: Target, rate: float, seconds: float) -> Sustained:
    """Submit at a steady rate, and read the lags of these tasks from the ledger."""
    load = at_rate(target, ACCEPTED, rate, seconds)
    load.require_all()
    stack.await_saved()
    with stack.engine.connect() as connection:
        ids = array_of_ids(receipt_ids(load.answers))
        lags = [float(lag) for lag in connection.execute(LAGS, {"ids": ids}).scalars()]
    if len(lags) != len(load.answers):
        raise MeasurementFailed(f"{len(load.answers) - len(lags):,} of {len(load.answers):,} tasks have no receipt.")
    return Sustained(seconds, load.per_second, load.waits(), percentile(lags, 0.5), percentile(lags, 0.99))


def measure_outage(stack: Stack, target: Target, rate: float, seconds: float, least_backlog: int) -> Outage:
    """Stop PostgreSQL under load, and measure the drain of what was accepted meanwhile."""
    with _Loading(target, rate) as loading:
        time.sleep(BEFORE_SECONDS)
        with postgres_stopped(stack.settings):
            time.sleep(seconds)
            load = loading.end()
            added = accept_messages(target, max(0, least_backlog - stack.waiting()))
        answers_again_at = datetime.now(UTC)
    backlog = stack.waiting()
    stack.await_saved()
    with stack.engine.connect() as connection:
        first, last, count = connection.execute(DRAINED, {"since": answers_again_at}).one()
    if not count:
        raise MeasurementFailed("The backlog was one batch only: measure a longer outage.")
    drain = count / (last - first).total_seconds()
    received = [answer for answer in load.answers if answer.status == CREATED]
    lost, doubled = compare(stack, [*receipt_ids(received), *added])
    turns = [measure_inserts(stack, backlog) for _ in range(TURNS)]
    bare, without_redis = median(turn[0] for turn in turns), median(turn[1] for turn in turns)
    return Outage(
        seconds,
        len(received),
        len(load.answers) - len(received),
        len(added),
        load.waits(),
        backlog,
        (first - answers_again_at).total_seconds(),
        drain,
        bare,
        without_redis,
        drain / bare,
        drain / without_redis,
        lost,
        doubled,
    )


def compare(stack: Stack, accepted: Sequence[str]) -> tuple[int, int]:
    """Return how many of these receipts the ledger does not keep, and how many tasks it has more than once."""
    with stack.engine.connect() as connection:
        saved = {str(id_) for id_ in connection.execute(SAVED).scalars()}
        doubled: int = connection.execute(DOUBLED).scalar_one()
    return len(set(accepted) - saved), doubled


def receipt_ids(answers: Sequence[Answer]) -> list[str]:
    return [answer.receipt()["id"] for answer in answers]


def measure_inserts(stack: Stack, count: int) -> tuple[float, float]:
    """Return how many rows per second the saver's INSERTs write on their own, and how many with its code around them.

    Both follow a checkpoint, as when PostgreSQL was stopped: the first change of each page costs more after it.
    """
    engine = make_engine(stack.settings.database_url, pool_size=1, max_overflow=0)
    try:
        recorded = _record(engine, _batches(stack, count))
        batches = _batches(stack, count)
        write_checkpoint(stack.settings)
        connection = engine.raw_connection()  # the only one, on which the statements are prepared
        cursor = connection.cursor()
        began_at = time.perf_counter()
        for statements in recorded:
            for statement, values in statements:
                cursor.execute(statement, values)
            connection.commit()
        bare = count / (time.perf_counter() - began_at)
        connection.close()
        write_checkpoint(stack.settings)
        began_at = time.perf_counter()
        for batch in batches:
            with Session(engine) as db:
                _save(db, batch)
                db.commit()
        return bare, count / (time.perf_counter() - began_at)
    finally:
        engine.dispose()


def _record(engine: Engine, batches: Sequence[Sequence[Entry]]) -> list[list[tuple[str, Any]]]:
    """Return the statements that insert each batch, with their values. What they insert is rolled back."""
    recorded: list[list[tuple[str, Any]]] = []

    def record(_connection: Any, _cursor: Any, statement: str, values: Any, *_: Any) -> None:
        if statement.strip().startswith(STATEMENTS):
            recorded[-1].append((statement, values))

    event.listen(engine, "before_cursor_execute", record)
    for batch in batches:
        recorded.append([])
        with Session(engine) as db:
            _save(db, batch)
    event.remove(engine, "before_cursor_execute", record)
    return recorded


def _save(db: Session, batch: Sequence[Entry]) -> None:
    given = task_messages.read(kinds.TASKS, batch)
    task_messages.save(db, given, task_messages.prepare(given))


def _batches(stack: Stack, count: int) -> list[list[Entry]]:
    entries = [_entry(number) for number in range(count)]
    size = stack.settings.receipt_batch_size
    return [entries[start : start + size] for start in range(0, count, size)]


def _entry(number: int) -> Entry:
    """Return an entry as `accept` would write it for the task of a client."""
    message = task_message(-1 - number)
    fields = {name: str(value) for name, value in message.fields.items()}
    return Entry(f"{number}-0", {"createdAtMs": str(int(time.time() * 1000)), **fields})


class _Loading:
    """Load in a thread, until it is ended."""

    def __init__(self, target: Target, rate: float) -> None:
        self._is_over = threading.Event()
        self._found: Load | None = None
        self._thread = threading.Thread(target=self._run, args=(target, rate), name="load")

    def __enter__(self) -> _Loading:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def end(self) -> Load:
        self._is_over.set()
        self._thread.join()
        if self._found is None:
            raise MeasurementFailed("The load ended early.")
        return self._found

    def _run(self, target: Target, rate: float) -> None:
        self._found = at_rate(target, ACCEPTED, rate, LONGEST_LOAD_SECONDS, is_over=self._is_over.is_set)
