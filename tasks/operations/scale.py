"""How many processes the workers of a queue shall have: the operator's target in the ledger, and what workers report.

Each prefork worker compares the target with its pool about once a second (`tasks/pools.py`), also after a restart. The
largest target among the queues that it consumes counts; a backlog may raise the operator's target
(`tasks/operations/backlog.py`). Without a target, a worker has as many processes as it was started with.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Engine

from models.driver_values import array
from models.errors import Misuse
from models.sql import sql
from settings import Settings
from tasks.core.registered_types import IS_LIVE
from tasks.operations.pauses import require_queue

logger = logging.getLogger(__name__)

MOST_PROCESSES: Final = 128

SET: Final = sql("""
    INSERT INTO ledger.queue_scale (queue, processes, actor, created_at)
    VALUES (:queue, :processes, :actor, (SELECT ledger.ledger_now()))
    ON CONFLICT (queue) DO UPDATE
    SET processes = excluded.processes, actor = excluded.actor, created_at = excluded.created_at
""")
RESET: Final = sql("DELETE FROM ledger.queue_scale WHERE queue = :queue")
_TARGETS: Final = "(SELECT queue, processes FROM ledger.queue_scale UNION ALL TABLE backlog) AS target"
_BACKLOG: Final = "backlog AS (SELECT queue, processes FROM ledger.queue_alert WHERE processes IS NOT NULL)"
# report: the size of a worker's pool; returns the target for its queues.
REPORT: Final = sql(f"""
    WITH {_BACKLOG}, reported AS (
        UPDATE ledger.task_worker SET processes = :processes
        WHERE worker = :worker AND processes IS DISTINCT FROM :processes)
    SELECT max(processes) FROM {_TARGETS} WHERE queue = ANY(CAST(:queues AS text[]))
""")
TARGETS: Final = sql(f"WITH {_BACKLOG} SELECT queue, max(processes) AS processes FROM {_TARGETS} GROUP BY queue")
WORKERS: Final = sql(f"""
    SELECT worker, queues, processes FROM ledger.task_worker WHERE {IS_LIVE} ORDER BY worker
""")


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """A live worker and the number of its processes; None if its pool cannot be changed, or is not known yet."""

    worker: str
    queues: list[str]
    processes: int | None


def set_scale(engine: Engine, settings: Settings, queue: str, processes: int | None, *, actor: str) -> None:
    """Set the target number of processes for each worker of the queue; None removes the target."""
    if processes is not None and not 1 <= processes <= MOST_PROCESSES:
        raise Misuse(f"A worker can have 1 to {MOST_PROCESSES} processes, not {processes}.")
    with engine.begin() as connection:
        require_queue(connection, settings, queue)
        if processes is None:
            connection.execute(RESET, {"queue": queue})
        else:
            connection.execute(SET, {"queue": queue, "processes": processes, "actor": actor})
    details = {"event": "queue_scaled", "queue": queue, "processes": processes, "actor": actor}
    number = "as it was started" if processes is None else str(processes)
    logger.info("Processes of each worker of %s, set by %s: %s", queue, actor, number, extra=details)


def report_size(engine: Engine, *, worker: str, queues: Collection[str], processes: int) -> int | None:
    """Record the size of a worker's pool, and return its target."""
    values = {"worker": worker, "queues": array(queues), "processes": processes}
    with engine.begin() as connection:
        target: int | None = connection.execute(REPORT, values).scalar_one()
    return target


def read_targets(connection: Connection) -> dict[str, int]:
    """Return the target number of processes of each queue that has a target."""
    return {row.queue: row.processes for row in connection.execute(TARGETS)}


def read_sizes(connection: Connection, queue: str | None = None) -> list[WorkerSize]:
    """Return the live workers, or those that consume the queue."""
    found = [WorkerSize(*row) for row in connection.execute(WORKERS)]
    return [each for each in found if queue is None or queue in each.queues]
