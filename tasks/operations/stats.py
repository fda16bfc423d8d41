"""Count tasks by status, type and queue, with the age of the oldest due task, and list the latest changes.

Counts are read from partial indexes and leases, and each is exact up to CEILING, so that a history of millions of rows
costs no more than a hundred thousand. Above that, the latest rows are counted and the count is marked as not exact.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import Connection

from models.sql import sql
from models.status import TaskStatus
from tasks.core.due_times import DUE_AT, KINDS, OPEN, TIME
from tasks.operations.listing import ListedTask, TaskFilter, list_tasks

CEILING: Final = 100_000
LATEST: Final = 10

_OF_KIND: Final = f"""SELECT status, next_retry_at, updated_at FROM ledger.ingest_task
            WHERE queue = kind.queue AND type = kind.type AND {OPEN} AND {DUE_AT}"""
_NOW: Final = "(SELECT at FROM clock)"

# open_kinds: open tasks by queue and type. The three parts are the due tasks, the scheduled ones, and those with a
# partition key. A task waits since it became due or was last changed, as a requeue does.
OPEN_KINDS: Final = sql(f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at), {KINDS}
    SELECT queue, type, found.* FROM kind CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE status = 'QUEUED') AS queued,
               count(*) FILTER (WHERE status = 'RETRYING') AS retrying,
               count(*) FILTER (WHERE {TIME} <= {_NOW}) AS due, count(*) FILTER (WHERE {TIME} > {_NOW}) AS scheduled,
               {_NOW} - min(greatest(next_retry_at, updated_at)) FILTER (WHERE {TIME} <= {_NOW}) AS oldest
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


@dataclass(frozen=True, slots=True)
class StatusCount:
    """The number of tasks with one status; at least that many if it is not exact."""

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
    open_ = {(row.queue, row.type): row for row in connection.execute(OPEN_KINDS, ceiling)}
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
    return Stats(_by_status(kinds), kinds, dead, list_tasks(connection, TaskFilter(), limit=LATEST))


def _by_status(kinds: list[KindCount]) -> list[StatusCount]:
    totals = {status: sum(kind.counts[status] for kind in kinds) for status in TaskStatus}
    open_ = all(kind.due < CEILING and kind.scheduled < CEILING for kind in kinds)
    done = totals[TaskStatus.SUCCEEDED] + totals[TaskStatus.DISCARDED] < CEILING
    exact = {
        TaskStatus.QUEUED: open_,
        TaskStatus.RETRYING: open_,
        TaskStatus.RUNNING: True,
        TaskStatus.SUCCEEDED: done,
        TaskStatus.DISCARDED: done,
        TaskStatus.DEAD: totals[TaskStatus.DEAD] < CEILING,
    }
    return [StatusCount(status, totals[status], exact[status]) for status in TaskStatus]
