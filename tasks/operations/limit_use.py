"""Read how much of each limit is used: which tasks run under it, and which wait for it.

Counting stops at a ceiling, and so does the list of the values of `limit_by`, so a million waiting tasks cost no more
than some thousand.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import Connection

from models.sql import sql
from tasks.core.due_times import OPEN

CEILING: Final = 1000  # waiting tasks of one type
MOST_VALUES: Final = 100  # of `limit_by`
VALUE_CEILING: Final = 100  # waiting tasks of one value

_WAITS: Final = f"task.limited_at IS NOT NULL AND task.{OPEN}"
# types: each type with limits; how many of its tasks run and wait. `running` is exact, `waiting` up to :ceiling.
TYPES: Final = sql(f"""
    SELECT known.type, known.queue, known.max_running, known.rate, known.limit_by, running.tasks AS running,
           waiting.tasks AS waiting, (SELECT ledger.ledger_now()) - waiting.since AS oldest
    FROM ledger.task_type known
    CROSS JOIN LATERAL (
        SELECT count(*) AS tasks FROM ledger.ingest_task task
        WHERE task.type = known.type AND task.limit_key IS NOT NULL AND task.status = 'RUNNING') AS running
    CROSS JOIN LATERAL (
        SELECT count(*) AS tasks, min(limited_at) AS since FROM (
            SELECT limited_at FROM ledger.ingest_task task
            WHERE task.type = known.type AND {_WAITS} LIMIT :ceiling) AS counted) AS waiting
    WHERE known.max_running IS NOT NULL OR known.rate IS NOT NULL ORDER BY known.type
""")
# values: the first values of `limit_by` for which tasks of a type wait, found by skipping from one to the next in the
# index; for each, how many wait up to :ceiling, and how many run.
VALUES: Final = sql(f"""
    WITH RECURSIVE value (type, key, place) AS (
        SELECT known.type, first.limit_key, 1 FROM ledger.task_type known CROSS JOIN LATERAL (
            SELECT limit_key FROM ledger.ingest_task task WHERE task.type = known.type AND {_WAITS}
            ORDER BY limit_key LIMIT 1) AS first
        WHERE known.limit_by IS NOT NULL
        UNION ALL
        SELECT value.type, next.limit_key, value.place + 1 FROM value CROSS JOIN LATERAL (
            SELECT limit_key FROM ledger.ingest_task task
            WHERE task.type = value.type AND task.limit_key > value.key AND {_WAITS} ORDER BY limit_key LIMIT 1) AS next
        WHERE value.place < :most)
    SELECT value.type, value.key, waiting.tasks AS waiting, running.tasks AS running FROM value
    CROSS JOIN LATERAL (
        SELECT count(*) AS tasks FROM (
            SELECT FROM ledger.ingest_task task WHERE task.type = value.type AND task.limit_key = value.key AND {_WAITS}
            LIMIT :ceiling) AS counted) AS waiting
    CROSS JOIN LATERAL (
        SELECT count(*) AS tasks FROM ledger.ingest_task task
        WHERE task.type = value.type AND task.limit_key = value.key AND task.status = 'RUNNING') AS running
    ORDER BY waiting.tasks DESC, value.key
""")


@dataclass(frozen=True, slots=True)
class ValueUse:
    """The tasks of one value of `limit_by`, such as one tenant."""

    key: str  # empty: tasks without a value
    waiting: int
    is_exact: bool
    running: int


@dataclass(frozen=True, slots=True)
class LimitUse:
    """The limits of a type, and how much of them is used."""

    type: str
    queue: str
    max_running: int | None
    rate: str | None
    limit_by: str | None
    running: int
    waiting: int
    is_exact: bool  # all waiting tasks were counted
    oldest: timedelta | None  # how long a task has waited, the longest of those that were counted
    values: list[ValueUse]  # those for which tasks wait, the most first
    has_all_values: bool


def read_limit_use(connection: Connection) -> list[LimitUse]:
    """Return all limits that workers have registered, by type."""
    values: dict[str, list[ValueUse]] = {}
    for type_, key, waiting, running in connection.execute(VALUES, {"most": MOST_VALUES, "ceiling": VALUE_CEILING}):
        values.setdefault(type_, []).append(ValueUse(key, waiting, waiting < VALUE_CEILING, running))
    found = []
    for row in connection.execute(TYPES, {"ceiling": CEILING}).mappings():
        own = values.get(row["type"], [])
        is_exact, has_all = row["waiting"] < CEILING, len(own) < MOST_VALUES
        found.append(LimitUse(**row, is_exact=is_exact, values=own, has_all_values=has_all))
    return found
