"""Read what a scrape shows about the ledger at this moment, with one short statement each. None reads the history."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection

from models.sql import sql
from outbox.lease_statements import WAITING
from tasks.core.due_times import DUE_AT, KINDS, OPEN, SINCE, TIME
from tasks.core.holders import origin_of
from tasks.core.registered_types import IS_LIVE
from tasks.operations.backlog import read_backlog_alerts

SEEN_LATELY_SECONDS: Final = 60.0

SAMPLE: Final = 100
EVENTS_CEILING: Final = 10_000
_NOW: Final = "(SELECT at FROM clock)"
_FIRST: Final = f"""SELECT {SINCE} AS since FROM ledger.ingest_task
            WHERE queue = kind.queue AND type = kind.type AND {OPEN} AND {DUE_AT}"""
# oldest: since when the oldest due task of each queue has waited. It is among the first in the index of due tasks:
# retries are in the order of their due times, and tasks without a key in the order in which they were submitted. Tasks
# with an idempotency key are in no order; if there are more than SAMPLE of one type, an older one may be missed.
OLDEST: Final = sql(f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at), {KINDS}
    SELECT queue, CAST(extract(epoch FROM max({_NOW} - since)) AS float8)
    FROM kind CROSS JOIN LATERAL (
        ({_FIRST} = '-infinity' ORDER BY {DUE_AT}, id LIMIT {SAMPLE})
        UNION ALL
        ({_FIRST} > '-infinity' AND {DUE_AT} <= {_NOW} ORDER BY {DUE_AT}, id LIMIT 1)
        UNION ALL
        ({_FIRST} = 'infinity' AND {TIME} <= {_NOW} LIMIT {SAMPLE})) AS found
    GROUP BY queue
""")
RUNNING: Final = sql("SELECT queue, sum(cardinality(task_ids)) FROM ledger.task_lease GROUP BY queue")
_UNORDERED: Final = "status IN ('NEW', 'RETRYING') AND ordering_key IS NULL"
_ORDERED: Final = "ordering_key IS NOT NULL AND status <> 'SENT'"
# events: unsent events, and those of them that are not due yet, counted in indexes. Above the ceiling, the number of
# unsent events is PostgreSQL's own estimate, which is as old as the last vacuum.
EVENTS: Final = sql(f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at), {WAITING}
    SELECT CASE WHEN unordered.count < :ceiling THEN unordered.count
                ELSE greatest(unordered.count, (SELECT CAST(reltuples AS bigint) FROM pg_class
                                                WHERE oid = 'ledger.ix_outbox_event_unsent'::regclass)) END
           + in_order.count,
           later.count + in_order.later
    FROM (SELECT count(*) FROM (SELECT FROM ledger.outbox_event WHERE {_UNORDERED} LIMIT :ceiling) AS found)
         AS unordered
    CROSS JOIN (
          SELECT count(*), count(*) FILTER (WHERE next_retry_at > {_NOW}) AS later
          FROM ledger.outbox_event WHERE {_ORDERED} AND status <> 'DEAD') AS in_order
    CROSS JOIN (
        SELECT coalesce(sum(count), 0) AS count FROM waiting CROSS JOIN LATERAL (
            SELECT count(*) FROM ledger.outbox_event
            WHERE destination = waiting.destination AND {_UNORDERED}
              AND coalesce(next_retry_at, '-infinity') > {_NOW}) AS of_destination) AS later
""")
WORKERS: Final = sql("""
    SELECT queue, count(worker) FROM ledger.task_queue
    LEFT JOIN ledger.task_worker ON queue = ANY(queues)
        AND task_worker.seen_at > (SELECT ledger.ledger_now()) - make_interval(secs => :seconds)
    GROUP BY queue
""")
REGISTERED: Final = sql(f"SELECT worker, queues, processes, {IS_LIVE} FROM ledger.task_worker ORDER BY worker")
RUNNING_BY_HOLDER: Final = sql("SELECT holder, sum(cardinality(task_ids)) FROM ledger.task_lease GROUP BY holder")
PREPARED: Final = sql("""
    SELECT count(*), CAST(coalesce(extract(epoch FROM (SELECT ledger.ledger_now()) - min(created_at)), 0) AS float8)
    FROM ledger.sink_transaction WHERE state NOT IN ('committed', 'aborted')
""")
# horizon: the age of the oldest transaction with a snapshot, or of the oldest prepared transaction. Transactions of
# other roles count only if our role may see them (pg_read_all_stats); `manage.py check` says so. Slots are not counted.
HORIZON: Final = sql("""
    SELECT CAST(coalesce(extract(epoch FROM (SELECT ledger.ledger_now()) - least(
        (SELECT min(xact_start) FROM pg_stat_activity WHERE backend_xmin IS NOT NULL OR backend_xid IS NOT NULL),
        (SELECT min(prepared) FROM pg_prepared_xacts))), 0) AS float8)
""")
TICKS: Final = sql("""
    SELECT name, CAST(extract(epoch FROM (SELECT ledger.ledger_now()) - finished_at) AS float8) FROM ledger.tick
    WHERE finished_at IS NOT NULL
""")


@dataclass(frozen=True, slots=True)
class Gauges:
    """The state of the ledger. Ages are in seconds."""

    oldest_due: dict[str, float]  # by queue
    running: dict[str, int]
    workers: dict[str, int]
    unsent_events: int
    scheduled_events: int
    prepared: int
    oldest_prepared: float
    horizon: float
    ticks: dict[str, float]
    backlog_alerts: dict[str, bool]  # by queue


@dataclass(frozen=True, slots=True)
class BusyWorker:
    """A registered worker, whether it is live, and how many tasks its processes run."""

    worker: str
    queues: list[str]
    processes: int
    is_live: bool
    running: int


def read_gauges(connection: Connection) -> Gauges:
    """Read all gauges. Every queue that a worker has registered or that has tasks is in all of them, so that a graph
    has no gaps, and an alert notices a queue that no worker has ever known."""
    oldest: dict[str, float] = {queue: max(0.0, age) for queue, age in connection.execute(OLDEST)}
    running = {queue: int(count) for queue, count in connection.execute(RUNNING)}
    workers: dict[str, int] = dict(connection.execute(WORKERS, {"seconds": SEEN_LATELY_SECONDS}).all())
    queues = sorted({*oldest, *running, *workers})
    unsent, scheduled = connection.execute(EVENTS, {"ceiling": EVENTS_CEILING}).one()
    prepared, oldest_prepared = connection.execute(PREPARED).one()
    return Gauges(
        {queue: oldest.get(queue, 0.0) for queue in queues},
        {queue: running.get(queue, 0) for queue in queues},
        {queue: workers.get(queue, 0) for queue in queues},
        unsent,
        scheduled,
        prepared,
        oldest_prepared,
        connection.execute(HORIZON).scalar_one(),
        dict(connection.execute(TICKS).all()),
        read_backlog_alerts(connection),
    )


def read_busy_workers(connection: Connection) -> list[BusyWorker]:
    """Return all registered workers. One whose pool reports no size counts as one process."""
    running: Counter[tuple[str, str]] = Counter()
    for holder, count in connection.execute(RUNNING_BY_HOLDER):
        running[origin_of(holder)] += int(count)
    return [
        BusyWorker(worker, queues, processes or 1, is_live, running[origin_of(worker)])
        for worker, queues, processes, is_live in connection.execute(REGISTERED)
    ]
