"""Count tasks by status, type and queue, with the age of the oldest due task, and list the latest changes.

Counts are read from partial indexes and leases, and each is exact up to a ceiling, so that a history of millions of
rows costs no more than some thousands. Above that, the count of a status is PostgreSQL's own estimate, which is as old
as the last vacuum, and is marked as not exact; the counts of queues and types are lower limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import Connection

from models.sql import sql
from models.status import TaskStatus
from tasks.core.due_times import DUE_AT, KINDS, OPEN, SINCE, TIME
from tasks.operations.listing import ListedTask, TaskFilter, list_tasks

CEILING: Final = 10_000  # of final tasks
KIND_CEILING: Final = 1000  # of each part of the open tasks of one queue and type
LATEST: Final = 10

_OF_KIND: Final = f"""SELECT status, next_retry_at, {SINCE} AS since FROM ledger.ingest_task
            WHERE queue = kind.queue AND type = kind.type AND {OPEN} AND {DUE_AT}"""
_NOW: Final = "(SELECT at FROM clock)"

# open_kinds: open tasks by queue and type. The three parts are the due tasks, the scheduled ones, and those with a
# partition key or that wait for a limit.
OPEN_KINDS: Final = sql(f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at), {KINDS}
    SELECT queue, type, found.* FROM kind CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE status = 'QUEUED') AS queued,
               count(*) FILTER (WHERE status = 'RETRYING') AS retrying,
               count(*) FILTER (WHERE {TIME} <= {_NOW}) AS due, count(*) FILTER (WHERE {TIME} > {_NOW}) AS scheduled,
               {_NOW} - min(since) FILTER (WHERE {TIME} <= {_NOW}) AS oldest
        FROM (({_OF_KIND} <= {_NOW} ORDER BY {DUE_AT}, id LIMIT :ceiling)
              UNION ALL ({_OF_KIND} > {_NOW} AND {DUE_AT} < 'infinity' LIMIT :ceiling)
              UNION ALL ({_OF_KIND} = 'infinity' LIMIT :ceiling)) AS parts) AS found
""")
# other_kinds: running and final tasks by queue, type, status and, for dead ones, error code.
OTHER_KINDS: Final = sql("""
    SELECT task.queue, task.type, 'RUNNING', NULL, count(*) FROM ledger.task_lease lease
    JOIN ledger.ingest_task task ON task.id = ANY(lease.task_ids) AND task.lease_token = lease.token GROUP BY 1, 2
    UNION ALL
    SELECT queue, type, status, NULL, count(*) FROM (
        SELECT queue, type, status FROM ledger.ingest_task WHERE status IN ('SUCCEEDED', 'DISCARDED')
        ORDER BY finished_at DESC LIMIT :ceiling) AS done GROUP BY 1, 2, 3
    UNION ALL
    SELECT queue, type, 'DEAD', error_code, count(*) FROM (
        SELECT queue, type, error_code FROM ledger.ingest_task WHERE status = 'DEAD'
        ORDER BY finished_at DESC, id DESC LIMIT :ceiling) AS dead GROUP BY 1, 2, 4
""")
# estimates: how many rows each partial index has, as of the last vacuum.
ESTIMATES: Final = sql("""
    SELECT split_part(relname, '_', 4), CAST(greatest(reltuples, 0) AS bigint) FROM pg_class
    WHERE oid IN ('ledger.ix_ingest_task_due'::regclass, 'ledger.ix_ingest_task_done'::regclass,
                  'ledger.ix_ingest_task_dead'::regclass)
""")


@dataclass(frozen=True, slots=True)
class StatusCount:
    """The number of tasks with one status; an estimate if it is not exact."""

    status: TaskStatus
    count: int
    exact: bool


@dataclass(frozen=True, slots=True)
class KindCount:
    """The tasks of one queue and type."""

    queue: str
    type: str
    counts: dict[TaskStatus, int]
    due: int
    scheduled: int
    oldest_due: timedelta | None


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """The number of DEAD tasks with one type and error code."""

    type: str
    error_code: str | None
    count: int


@dataclass(frozen=True, slots=True)
class Stats:
    statuses: list[StatusCount]
    kinds: list[KindCount]
    dead: list[ErrorCount]
    latest: list[ListedTask]


Kind = tuple[str, str]


def read_stats(connection: Connection) -> Stats:
    """Count all tasks, and read the latest changes."""
    ceiling = {"ceiling": CEILING}
    open_ = {(row.queue, row.type): row for row in connection.execute(OPEN_KINDS, {"ceiling": KIND_CEILING})}
    counts: dict[Kind, Counter[TaskStatus]] = {
        kind: Counter({TaskStatus.QUEUED: row.queued, TaskStatus.RETRYING: row.retrying}) for kind, row in open_.items()
    }
    errors: Counter[tuple[str, str | None]] = Counter()
    for queue, type_, status, error_code, count in connection.execute(OTHER_KINDS, ceiling):
        counts.setdefault((queue, type_), Counter())[TaskStatus(status)] += count
        if status == TaskStatus.DEAD:
            errors[type_, error_code] += count
    kinds = []
    for kind, by_status in sorted(counts.items(), key=lambda item: item[0]):
        row = open_.get(kind)
        waiting = (row.due, row.scheduled, row.oldest) if row else (0, 0, None)
        kinds.append(KindCount(*kind, {status: by_status[status] for status in TaskStatus}, *waiting))
    dead = [ErrorCount(type_, error_code, count) for (type_, error_code), count in errors.most_common()]
    estimates: dict[str, int] = dict(connection.execute(ESTIMATES).all())
    return Stats(_by_status(kinds, estimates), kinds, dead, list_tasks(connection, TaskFilter(), limit=LATEST))


def _by_status(kinds: list[KindCount], estimates: Mapping[str, int]) -> list[StatusCount]:
    counted = {status: sum(kind.counts[status] for kind in kinds) for status in TaskStatus}
    open_ = all(kind.due < KIND_CEILING and kind.scheduled < KIND_CEILING for kind in kinds)
    done = counted[TaskStatus.SUCCEEDED] + counted[TaskStatus.DISCARDED] < CEILING
    exact = {
        TaskStatus.QUEUED: open_,
        TaskStatus.RETRYING: open_,
        TaskStatus.RUNNING: True,
        TaskStatus.SUCCEEDED: done,
        TaskStatus.DISCARDED: done,
        TaskStatus.DEAD: counted[TaskStatus.DEAD] < CEILING,
    }
    about = {
        TaskStatus.QUEUED: estimates["due"] - counted[TaskStatus.RETRYING],
        TaskStatus.SUCCEEDED: estimates["done"] - counted[TaskStatus.DISCARDED],
        TaskStatus.DEAD: estimates["dead"],
    }
    return [
        StatusCount(status, count if exact[status] else max(count, about.get(status, 0)), exact[status])
        for status, count in counted.items()
    ]
