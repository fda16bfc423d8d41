"""How many tasks there are, of which status, type and queue, how long the oldest due one waits, and the latest ones.

Read from partial indexes and leases. Each count is exact up to a ceiling, so that a history of millions costs a look no
more than a hundred thousand do; of what is final, the latest hundred thousand are counted then, and the answer says so.
"""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Connection

from models.sql import sql
from models.status import TaskStatus
from tasks.core.due import DUE_AT, KINDS, OPEN, TIME
from tasks.operations.listing import ListedTask, Wanted, listed

CEILING: Final = 100_000
LATEST: Final = 10

_OF_KIND: Final = f"""SELECT status, next_retry_at, updated_at FROM ledger.ingest_task
            WHERE queue = kind.queue AND type = kind.type AND {OPEN} AND {DUE_AT}"""
_NOW: Final = "(SELECT at FROM clock)"
_BOTH: Final = """count(*) FILTER (WHERE status = 'QUEUED') AS queued,
               count(*) FILTER (WHERE status = 'RETRYING') AS retrying"""

# open: by kind, what is due, what is scheduled, and what has a partition key, which may be either; due since it may
# run, which is after a requeue later than creation.
OPEN_KINDS: Final = sql(f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at), {KINDS}
    SELECT queue, type, due.queued + later.queued + keyed.queued AS queued,
           due.retrying + later.retrying + keyed.retrying AS retrying, due.queued + due.retrying + keyed.due AS due,
           later.queued + later.retrying + keyed.queued + keyed.retrying - keyed.due AS scheduled,
           {_NOW} - least(due.since, keyed.since) AS oldest
    FROM kind CROSS JOIN LATERAL (
        SELECT {_BOTH}, min(greatest(next_retry_at, updated_at)) AS since
        FROM ({_OF_KIND} <= {_NOW} ORDER BY {DUE_AT}, id LIMIT :ceiling) AS found) AS due
    CROSS JOIN LATERAL (
        SELECT {_BOTH} FROM ({_OF_KIND} > {_NOW} AND {DUE_AT} < 'infinity' LIMIT :ceiling) AS found) AS later
    CROSS JOIN LATERAL (
        SELECT {_BOTH}, count(*) FILTER (WHERE {TIME} <= {_NOW}) AS due,
               min(greatest(next_retry_at, updated_at)) FILTER (WHERE {TIME} <= {_NOW}) AS since
        FROM ({_OF_KIND} = 'infinity' LIMIT :ceiling) AS found) AS keyed
""")
RUNNING: Final = sql("""
    SELECT task.queue, task.type, count(*) FROM ledger.task_lease lease
    JOIN ledger.ingest_task task ON task.id = ANY(lease.task_ids) AND task.lease_token = lease.token GROUP BY 1, 2
""")
DONE: Final = sql("""
    SELECT queue, type, status, count(*) FROM (
        SELECT queue, type, status FROM ledger.ingest_task WHERE status IN ('SUCCEEDED', 'DISCARDED')
        ORDER BY finished_at DESC LIMIT :ceiling) AS done GROUP BY 1, 2, 3
""")
DEAD: Final = sql("""
    SELECT queue, type, error_code, count(*) FROM (
        SELECT queue, type, error_code FROM ledger.ingest_task WHERE status = 'DEAD'
        ORDER BY finished_at DESC, id DESC LIMIT :ceiling) AS dead GROUP BY 1, 2, 3
""")
_LOOK: Final = {"ceiling": CEILING}


@dataclass(frozen=True, slots=True)
class StatusCount:
    """Not exact: at least so many."""

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
    """DEAD tasks by what killed them."""

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


def stats(connection: Connection) -> Stats:
    open_ = {(row.queue, row.type): row for row in connection.execute(OPEN_KINDS, _LOOK)}
    counts: Counter[tuple[Kind, TaskStatus]] = Counter()
    for queue, type_, number in connection.execute(RUNNING):
        counts[(queue, type_), TaskStatus.RUNNING] += number
    for queue, type_, status, number in connection.execute(DONE, _LOOK):
        counts[(queue, type_), TaskStatus(status)] += number
    errors: Counter[tuple[str, str | None]] = Counter()
    for queue, type_, code, number in connection.execute(DEAD, _LOOK):
        counts[(queue, type_), TaskStatus.DEAD] += number
        errors[type_, code] += number
    for kind, row in open_.items():
        counts[kind, TaskStatus.QUEUED] += row.queued
        counts[kind, TaskStatus.RETRYING] += row.retrying
    kinds = []
    for kind in sorted({kind for kind, _ in counts}):
        found = open_.get(kind)
        waits = (found.due, found.scheduled, found.oldest) if found else (0, 0, None)
        kinds.append(KindCount(*kind, {status: counts[kind, status] for status in TaskStatus}, *waits))
    dead = [ErrorCount(type_, code, number) for (type_, code), number in errors.most_common()]
    return Stats(_by_status(counts, open_.values()), kinds, dead, listed(connection, Wanted(), limit=LATEST))


def _by_status(counts: Counter[tuple[Kind, TaskStatus]], open_: Iterable[Any]) -> list[StatusCount]:
    totals = Counter[TaskStatus]()
    for (_, status), number in counts.items():
        totals[status] += number
    ceiling = _LOOK["ceiling"]
    done = totals[TaskStatus.SUCCEEDED] + totals[TaskStatus.DISCARDED] < ceiling
    waiting = all(row.due < ceiling and row.scheduled < ceiling for row in open_)
    exact = {
        TaskStatus.QUEUED: waiting,
        TaskStatus.RETRYING: waiting,
        TaskStatus.RUNNING: True,
        TaskStatus.SUCCEEDED: done,
        TaskStatus.DISCARDED: done,
        TaskStatus.DEAD: totals[TaskStatus.DEAD] < ceiling,
    }
    return [StatusCount(status, totals[status], exact[status]) for status in TaskStatus]
