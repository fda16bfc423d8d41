"""List the workers with what they run now, as the ledger knows it. No worker is asked."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from sqlalchemy import Connection

from models.sql import sql
from tasks.core.holders import origin_of
from tasks.core.registered_types import IS_LIVE, RENEW_SECONDS

LATE_SECONDS: Final = 2 * RENEW_SECONDS  # since the last sign of life
SHOWN_IDS: Final = 5  # of the tasks of a batch
MOST_BATCHES: Final = 500

# workers: all that are registered. A row that is not live stays until another worker renews its own.
WORKERS: Final = sql(f"""
    SELECT worker, queues, types, processes, topic, version, started_at, seen_at, {IS_LIVE} AS is_live,
           seen_at < (SELECT ledger.ledger_now()) - make_interval(secs => {LATE_SECONDS:g}) AS is_late
    FROM ledger.task_worker ORDER BY worker
""")
# batches: the leases whose tasks are not all settled, the oldest first, with their first tasks.
BATCHES: Final = sql(f"""
    SELECT lease.holder, lease.type, lease.queue, lease.claimed_at, lease.lease_until,
           lease.lease_until <= (SELECT ledger.ledger_now()) AS is_expired, lease.is_extended, running.tasks,
           running.ids[1:{SHOWN_IDS}] AS task_ids
    FROM ledger.task_lease lease CROSS JOIN LATERAL (
        SELECT count(*) AS tasks, array_agg(task.id ORDER BY task.id) AS ids FROM ledger.ingest_task task
        WHERE task.id = ANY(lease.task_ids) AND task.lease_token = lease.token) AS running
    WHERE running.tasks > 0 ORDER BY lease.claimed_at, lease.token LIMIT :most
""")


@dataclass(frozen=True, slots=True)
class RunningBatch:
    """Tasks that one process runs under one lease."""

    holder: str
    type: str
    queue: str
    claimed_at: datetime
    lease_until: datetime
    is_expired: bool  # reclaim may give its tasks to another worker
    is_extended: bool  # reclaim gave extra time
    tasks: int
    task_ids: list[uuid.UUID]  # the first of them


@dataclass(frozen=True, slots=True)
class ListedWorker:
    """A worker and the batches of its processes."""

    worker: str
    queues: list[str]
    types: list[str]  # that it has handlers for
    processes: int | None  # None if its pool cannot be changed, or is not known yet
    topic: str | None  # of Kafka, from which its wake-ups come; None: from Celery's queues
    version: str | None  # of Celery and Python
    started_at: datetime
    seen_at: datetime
    is_live: bool
    is_late: bool
    batches: list[RunningBatch] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Workers:
    workers: list[ListedWorker]
    others: list[RunningBatch]  # of processes whose worker is not registered
    is_complete: bool  # all batches were read


def list_workers(connection: Connection) -> Workers:
    """Return all registered workers by name, and what they run."""
    found = [ListedWorker(**row) for row in connection.execute(WORKERS).mappings()]
    batches = [RunningBatch(**row) for row in connection.execute(BATCHES, {"most": MOST_BATCHES}).mappings()]
    by_origin = {origin_of(each.worker): each for each in found}
    others: list[RunningBatch] = []
    for batch in batches:
        worker = by_origin.get(origin_of(batch.holder))
        (worker.batches if worker else others).append(batch)
    return Workers(found, others, len(batches) < MOST_BATCHES)
