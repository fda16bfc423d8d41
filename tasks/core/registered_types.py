"""What workers have registered in the ledger: types with their settings, queues, and which live worker knows what.

A worker registers its handlers and INGEST_QUEUES when it starts, and renews its own row every few seconds. From there,
`ingest_submit` and processes without the handlers take the defaults of a task. A worker that is killed is no longer
live after LIVE_SECONDS, and the next renewal of another worker deletes its row. The defaults of a type stay for
FORGET_DAYS after its last worker, so that tasks can be submitted while no worker runs.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from typing import Final

from sqlalchemy import Connection, Engine

from models.driver_values import array
from models.sql import sql
from settings import Settings
from tasks.core.due_times import KINDS
from tasks.core.holders import holder_of
from tasks.core.limits import Limits, Rate
from tasks.core.registered_schedules import declare
from tasks.core.registry import Handler

RENEW_SECONDS: Final = 10.0
LIVE_SECONDS: Final = 40.0
FORGET_DAYS: Final = 30
IS_LIVE: Final = f"seen_at > (SELECT ledger.ledger_now()) - interval '{LIVE_SECONDS:g} s'"

# register: types, queues and the worker. Rows are locked in one order, so that two workers do not deadlock.
REGISTER: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    types AS (
        INSERT INTO ledger.task_type (type, queue, max_attempts, batch, priority, max_running, rate, limit_by, seen_at)
        SELECT given.*, at
        FROM unnest(CAST(:types AS text[]), CAST(:type_queues AS text[]), CAST(:max_attempts AS integer[]),
                    CAST(:batches AS integer[]), CAST(:priorities AS integer[]), CAST(:max_running AS integer[]),
                    CAST(:rates AS text[]), CAST(:limit_by AS text[])) AS given CROSS JOIN clock ORDER BY 1
        ON CONFLICT (type) DO UPDATE
        SET queue = excluded.queue, max_attempts = excluded.max_attempts, batch = excluded.batch,
            priority = excluded.priority, max_running = excluded.max_running, rate = excluded.rate,
            limit_by = excluded.limit_by, seen_at = excluded.seen_at),
    queues AS (
        INSERT INTO ledger.task_queue (queue, max_attempts, seen_at)
        SELECT queue, :default_attempts, at FROM unnest(CAST(:queues AS text[])) AS given(queue) CROSS JOIN clock
        ORDER BY queue
        ON CONFLICT (queue) DO UPDATE SET max_attempts = excluded.max_attempts, seen_at = excluded.seen_at),
    old_types AS (
        DELETE FROM ledger.task_type
        WHERE seen_at < (SELECT at FROM clock) - interval '{FORGET_DAYS} days'
          AND type <> ALL(CAST(:types AS text[]))),
    old_queues AS (
        DELETE FROM ledger.task_queue
        WHERE seen_at < (SELECT at FROM clock) - interval '{FORGET_DAYS} days'
          AND queue <> ALL(CAST(:queues AS text[])))
    INSERT INTO ledger.task_worker (worker, queues, types, topic, version, started_at, seen_at)
    SELECT :worker, CAST(:consumed AS text[]), CAST(:types AS text[]), CAST(:topic AS text), :version, at, at FROM clock
    WHERE CAST(:consumed AS text[]) <> '{{}}'
    ON CONFLICT (worker) DO UPDATE SET queues = excluded.queues, types = excluded.types, topic = excluded.topic,
        version = excluded.version, seen_at = excluded.seen_at
""")
# renew: the worker's sign of life. Deletes the rows of dead workers, and once an hour renews its types and queues.
RENEW: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    alive AS (
        UPDATE ledger.task_worker SET seen_at = (SELECT at FROM clock) WHERE worker = :worker RETURNING worker),
    dead AS (
        DELETE FROM ledger.task_worker WHERE worker IN (
            SELECT worker FROM ledger.task_worker WHERE worker <> :worker AND NOT {IS_LIVE} FOR UPDATE SKIP LOCKED)),
    types AS (
        UPDATE ledger.task_type SET seen_at = (SELECT at FROM clock) WHERE type IN (
            SELECT type FROM ledger.task_type
            WHERE type = ANY(CAST(:types AS text[])) AND seen_at < (SELECT at FROM clock) - interval '1 hour'
            FOR NO KEY UPDATE SKIP LOCKED)),
    queues AS (
        UPDATE ledger.task_queue SET seen_at = (SELECT at FROM clock) WHERE queue IN (
            SELECT queue FROM ledger.task_queue
            WHERE queue = ANY(CAST(:queues AS text[])) AND seen_at < (SELECT at FROM clock) - interval '1 hour'
            FOR NO KEY UPDATE SKIP LOCKED))
    SELECT count(*) FROM alive
""")
FORGET_WORKER: Final = sql("DELETE FROM ledger.task_worker WHERE worker = :worker")
LIVE_WORKERS: Final = sql(
    f"SELECT worker, queues, types, topic FROM ledger.task_worker WHERE {IS_LIVE} ORDER BY worker"
)
TYPES: Final = sql("""
    SELECT type, queue, max_attempts, batch, priority, max_running, rate, limit_by, seen_at
    FROM ledger.task_type ORDER BY type
""")
LIMITED_TYPES: Final = sql("""
    SELECT type, max_running, rate, limit_by FROM ledger.task_type WHERE max_running IS NOT NULL OR rate IS NOT NULL
""")
TYPE_NAMES: Final = sql("SELECT type FROM ledger.task_type ORDER BY type")
KNOWN_QUEUES: Final = sql("SELECT ledger.ingest_known_queues()")
WAITING_KINDS: Final = sql(f"WITH RECURSIVE {KINDS} SELECT queue, type FROM kind")


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker that has given a sign of life lately."""

    worker: str
    queues: list[str]  # that it consumes
    types: list[str]  # that it has handlers for
    topic: str | None  # of Kafka, from which its wake-ups come; None: from Celery's queues

    def can_run(self, queue: str, type: str) -> bool:
        return queue in self.queues and type in self.types


@dataclass(frozen=True, slots=True)
class RegisteredType:
    """What workers have registered about a type, and the live workers that know it."""

    type: str
    queue: str
    max_attempts: int
    batch: int
    priority: int
    max_running: int | None
    rate: str | None
    limit_by: str | None
    seen_at: datetime
    workers: list[str]


class Registration:
    """Keeps one worker registered. `tick` may be called often: it writes only every RENEW_SECONDS."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        handlers: Mapping[str, Handler],
        *,
        consumed: Collection[str],
        topic: str | None = None,
    ) -> None:
        """`consumed`: the queues of this worker. One that consumes no queue for tasks registers its types only."""
        self.engine = engine
        self.worker = holder_of(os.getpid())
        known = sorted(handlers.values(), key=lambda handler: handler.type)
        run_from = sorted(set(consumed) & set(settings.ingest_queues))
        self._runs_tasks = bool(run_from)
        self._values = {
            "worker": self.worker,
            "types": array(handler.type for handler in known),
            "type_queues": array(handler.queue for handler in known),
            "max_attempts": array(handler.max_attempts or settings.ingest_max_attempts for handler in known),
            "batches": array(handler.batch for handler in known),
            "priorities": array(handler.priority for handler in known),
            "max_running": array(handler.limits and handler.limits.max_running for handler in known),
            "rates": array(_rate_of(handler) for handler in known),
            "limit_by": array(handler.limits and handler.limits.limit_by for handler in known),
            "queues": array(sorted(settings.ingest_queues)),
            "default_attempts": settings.ingest_max_attempts,
            "consumed": array(run_from),
            "topic": topic,
            "version": f"Celery {version('celery')}, Python {platform.python_version()}",
        }
        self._types = {handler.type for handler in known}
        self._schedules = {handler.type: handler.schedule for handler in known if handler.schedule}
        self._declared_at: datetime | None = None
        self._due_at = 0.0
        self._is_registered = self._has_ended = False
        self._lock = threading.Lock()

    def tick(self) -> bool:
        """Register, or renew. Return False if neither is due."""
        with self._lock:
            is_done = self._is_registered and not self._runs_tasks
            if self._has_ended or is_done or time.monotonic() < self._due_at:
                return False
            self._due_at = time.monotonic() + RENEW_SECONDS
            with self.engine.begin() as connection:
                if not self._is_registered or not connection.execute(RENEW, self._values).scalar_one():
                    connection.execute(REGISTER, self._values)
                    self._declared_at = declare(
                        connection,
                        self._schedules,
                        types=self._types,
                        declared_at=self._declared_at,
                        forget_days=FORGET_DAYS,
                    )
            self._is_registered = True
            return True

    def end(self) -> None:
        """Delete the worker's row, because it stops. Its types and queues stay."""
        with self._lock:
            self._has_ended = True
            with self.engine.begin() as connection:
                connection.execute(FORGET_WORKER, {"worker": self.worker})


def _rate_of(handler: Handler) -> str | None:
    return str(handler.limits.rate) if handler.limits and handler.limits.rate else None


def live_workers(connection: Connection) -> list[LiveWorker]:
    return [LiveWorker(*row) for row in connection.execute(LIVE_WORKERS)]


def registered_types(connection: Connection) -> list[RegisteredType]:
    """Return all types that workers have registered, by name."""
    live = live_workers(connection)
    found = []
    for row in connection.execute(TYPES).mappings():
        workers = [each.worker for each in live if row["type"] in each.types]
        found.append(RegisteredType(**row, workers=workers))
    return found


def registered_limits(connection: Connection) -> list[Limits]:
    """Return the limits that workers have registered. A type whose rate is not understood has none here."""
    found = []
    for type_, max_running, rate, limit_by in connection.execute(LIMITED_TYPES):
        with suppress(ValueError):  # written by another version
            found.append(Limits(type_, max_running, Rate.parse(rate) if rate else None, limit_by))
    return found


def registered_type_names(connection: Connection) -> list[str]:
    return list(connection.execute(TYPE_NAMES).scalars())


def registered_queues(connection: Connection) -> list[str]:
    """Return the queues that workers have registered; `ingest` in a ledger without workers so far."""
    return list(connection.execute(KNOWN_QUEUES).scalar_one())


def unhandled_kinds(connection: Connection) -> list[tuple[str, str]]:
    """Return the pairs (queue, type) of waiting tasks that no live worker can run; empty if there is no live worker."""
    live = live_workers(connection)
    waiting = connection.execute(WAITING_KINDS).all() if live else ()
    return [(queue, type_) for queue, type_ in waiting if not any(each.can_run(queue, type_) for each in live)]
