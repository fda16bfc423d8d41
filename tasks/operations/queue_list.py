"""List the queues: what waits, runs and is dead in each, and what operators have set for it.

Due tasks are counted up to CEILING for each type, as in `stats.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from pydantic.alias_generators import to_camel
from sqlalchemy import Connection

from models.errors import Unreachable
from models.sql import sql
from settings import Settings
from tasks import broker
from tasks.core.due_times import DUE_AT, KINDS, OPEN, SINCE, TIME
from tasks.core.registered_types import registered_queues
from tasks.operations.backlog import read_alerts
from tasks.operations.pauses import QueuePause, read_pauses
from tasks.operations.scale import WorkerSize, read_sizes, read_targets
from tasks.operations.stats import CEILING

_OF_KIND: Final = f"""SELECT {SINCE} AS since FROM ledger.ingest_task
            WHERE queue = kind.queue AND type = kind.type AND {OPEN} AND {DUE_AT}"""
_NOW: Final = "(SELECT at FROM clock)"
# due: the due tasks of each queue, those that wait for their partition key or for a limit included, and the age of the
# oldest.
DUE: Final = sql(f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at), {KINDS}
    SELECT queue, sum(due) AS due, bool_and(due < :ceiling) AS exact, {_NOW} - min(since) AS oldest
    FROM kind CROSS JOIN LATERAL (
        SELECT count(*) AS due, min(since) AS since
        FROM (({_OF_KIND} <= {_NOW} ORDER BY {DUE_AT}, id LIMIT :ceiling)
              UNION ALL ({_OF_KIND} = 'infinity' AND {TIME} <= {_NOW} LIMIT :ceiling)) AS parts) AS found
    GROUP BY queue
""")
RUNNING: Final = sql("""
    SELECT task.queue, count(*) AS tasks FROM ledger.task_lease lease
    JOIN ledger.ingest_task task ON task.id = ANY(lease.task_ids) AND task.lease_token = lease.token GROUP BY 1
""")
DEAD: Final = sql("""
    SELECT queue, count(*) AS tasks FROM (
        SELECT queue FROM ledger.ingest_task WHERE status = 'DEAD'
        ORDER BY finished_at DESC, id DESC LIMIT :ceiling) AS dead GROUP BY 1
""")


@dataclass(frozen=True, slots=True)
class ListedQueue:
    """One queue. `messages` is None if the broker cannot say how many of its messages wait."""

    queue: str
    messages: int | None
    due: int
    due_is_exact: bool
    oldest_due: timedelta | None
    running: int
    dead: int
    pause: QueuePause | None
    intake_pause: QueuePause | None
    alert_since: datetime | None
    takes_tasks: bool  # new tasks are accepted
    target_processes: int | None
    workers: list[WorkerSize]


@dataclass(frozen=True, slots=True)
class Queues:
    queues: list[ListedQueue]
    dlq: str | None  # the broker's queue with dead letters
    dlq_messages: int | None


def list_queues(connection: Connection, settings: Settings, *, kind_ceiling: int = CEILING) -> Queues:
    """Return all queues that this process or a worker knows, or that have open tasks.

    `kind_ceiling` is up to where due tasks of one queue and type are counted.
    """
    due = {row.queue: row for row in connection.execute(DUE, {"ceiling": kind_ceiling})}
    running: dict[str, int] = {row.queue: row.tasks for row in connection.execute(RUNNING)}
    dead: dict[str, int] = {row.queue: row.tasks for row in connection.execute(DEAD, {"ceiling": CEILING})}
    pauses = {(pause.queue, pause.intake): pause for pause in read_pauses(connection)}
    alerts, targets, workers = read_alerts(connection), read_targets(connection), read_sizes(connection)
    names = sorted({*settings.ingest_queues, *registered_queues(connection), *due, *running})
    connection.commit()  # the broker may be slow
    depths = _depths(names, settings)
    found = []
    for name in names:
        row, alert = due.get(name), alerts.get(name)
        listed = ListedQueue(
            queue=name,
            messages=depths.get(name),
            due=int(row.due) if row else 0,
            due_is_exact=row.exact if row else True,
            oldest_due=row.oldest if row else None,
            running=running.get(name, 0),
            dead=dead.get(name, 0),
            pause=pauses.get((name, False)),
            intake_pause=pauses.get((name, True)),
            alert_since=alert.since if alert else None,
            takes_tasks=(name, True) not in pauses and not (alert and alert.refuses),
            target_processes=targets.get(name),
            workers=[each for each in workers if name in each.queues],
        )
        found.append(listed)
    return Queues(found, settings.ingest_dlq_queue or None, depths.get(settings.ingest_dlq_queue))


def show_queues(found: Queues) -> dict[str, Any]:
    """Return the queues as JSON shows them, over HTTP and on the command line."""
    shown: dict[str, Any] = _camel(asdict(found))
    return shown


def _camel(value: Any) -> Any:
    if isinstance(value, dict):
        return {to_camel(name): _camel(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_camel(each) for each in value]
    return value.total_seconds() if isinstance(value, timedelta) else value


def _depths(names: list[str], settings: Settings) -> dict[str, int]:
    """Count the broker's messages. One topic of Kafka has the messages of all queues."""
    dlq = [settings.ingest_dlq_queue] if settings.ingest_dlq_queue else []
    try:
        shown = [*(names if settings.ingest_queue == "celery" else ()), *dlq]
        return broker.depths(shown, patience_seconds=broker.SHOWN_SECONDS)
    except Unreachable:
        return {}
