"""Group the DEAD tasks by type and error fingerprint: how many, since when, the latest, and counts per hour or day.

The ledger computes the fingerprint of an error (`models/tasks.py`): errors that differ only in numbers, ids and quoted
words have the same one. `ix_ingest_task_dead_errors` has the tasks of a group side by side. Up to CEILING dead tasks
are counted by reading that index once. If there are more, the groups are found by skipping from one to the next, and
each is counted up to its share of CEILING, so the count of a large group is a lower limit and is marked as not exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy import Connection, TextClause

from models.driver_values import array, storable
from models.sql import sql
from models.status import TaskStatus
from tasks.operations.listing import ListedTask, columns_of
from tasks.operations.stats import ESTIMATES, StatusCount

CEILING: Final = 60_000  # of tasks that are counted one by one
MOST_GROUPS: Final = 1000  # that a list has
_DEAD: Final = "FROM ledger.ingest_task WHERE status = 'DEAD'"


class GroupOrder(StrEnum):
    """Which groups come first: the word in the address."""

    LAST = "last"  # those in which a task died last
    COUNT = "count"  # the largest


class GroupKey(NamedTuple):
    """What the tasks of a group have in common. The fingerprint of tasks that died without an error is empty."""

    type: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """How many tasks of a group are dead, and when the first and the last of them died."""

    key: GroupKey
    dead: StatusCount
    first_at: datetime
    last_at: datetime


@dataclass(frozen=True, slots=True)
class DeadGroups:
    """The first MOST_GROUPS groups, how many groups there are, and how many dead tasks in all."""

    groups: list[DeadGroup]
    total: int
    dead: StatusCount


@dataclass(frozen=True, slots=True)
class Deaths:
    """How many tasks of a group died in each hour or day. If not exact, only the latest ones are counted."""

    counts: dict[datetime, int]
    exact: bool


def _of_group(columns: str, rest: str) -> str:
    """Return a query for the tasks of `chosen`, a type and a fingerprint. `=` and IS NULL each use the index."""
    same = f"{_DEAD} AND type = chosen.type AND error_fingerprint"
    return f"""((SELECT {columns} {same} = chosen.fingerprint {rest})
                UNION ALL (SELECT {columns} {same} IS NULL AND chosen.fingerprint = '' {rest}))"""


_CHOSEN: Final = """unnest(CAST(:types AS text[]), CAST(:fingerprints AS text[]))
        WITH ORDINALITY AS chosen (type, fingerprint, place)"""

# group: all groups of the first `:ceiling` tasks of the index, the largest or the latest ones first.
GROUP: Final = {
    order: sql(f"""
        SELECT type, coalesce(error_fingerprint, '') AS fingerprint, count(*) AS tasks, min(finished_at) AS first_at,
               max(finished_at) AS last_at, count(*) OVER () AS groups, sum(count(*)) OVER () AS dead
        FROM (SELECT type, error_fingerprint, finished_at {_DEAD}
              ORDER BY type, error_fingerprint, finished_at LIMIT :ceiling) AS counted
        GROUP BY type, error_fingerprint ORDER BY {first} DESC, type, fingerprint LIMIT {MOST_GROUPS}""")
    for order, first in ((GroupOrder.LAST, "last_at"), (GroupOrder.COUNT, "tasks"))
}
# find: the groups, by skipping from one to the next in the index.
FIND: Final = sql(f"""
    WITH RECURSIVE found (type, fingerprint, place) AS (
        (SELECT type, error_fingerprint, 1 {_DEAD} ORDER BY type, error_fingerprint LIMIT 1)
        UNION ALL
        SELECT next.*, place + 1 FROM found CROSS JOIN LATERAL (
            (SELECT type, error_fingerprint {_DEAD} AND type = found.type AND error_fingerprint > found.fingerprint
             ORDER BY error_fingerprint LIMIT 1)
            UNION ALL (SELECT type, error_fingerprint {_DEAD} AND type = found.type AND error_fingerprint IS NULL
                       AND found.fingerprint IS NOT NULL LIMIT 1)
            UNION ALL (SELECT type, error_fingerprint {_DEAD} AND type > found.type
                       ORDER BY type, error_fingerprint LIMIT 1)
            LIMIT 1) AS next
        WHERE place < {MOST_GROUPS})
    SELECT type, coalesce(fingerprint, '') FROM found ORDER BY place
""")
# count: how many tasks of each group are dead, up to `:ceiling`, and when the first and the last of them died.
COUNT: Final = sql(f"""
    SELECT chosen.type, chosen.fingerprint,
           (SELECT count(*) FROM {_of_group("", "LIMIT :ceiling")} AS counted),
           (SELECT finished_at FROM {_of_group("finished_at", "ORDER BY finished_at LIMIT 1")} AS first),
           last.finished_at
    FROM {_CHOSEN} CROSS JOIN LATERAL
        {_of_group("finished_at", "ORDER BY finished_at DESC LIMIT 1")} AS last
    ORDER BY place
""")
# latest: the tasks of each group that died last.
LATEST: Final = sql(f"""
    SELECT chosen.type, chosen.fingerprint, latest.* FROM {_CHOSEN} CROSS JOIN LATERAL
        {_of_group(columns_of(ListedTask), "ORDER BY finished_at DESC LIMIT :limit")} AS latest
    ORDER BY place, latest.finished_at DESC, latest.id
""")
# deaths: how many tasks of each group died per hour or day, of the latest `:ceiling` since `:since`.
DEATHS: Final = sql(f"""
    SELECT chosen.type, chosen.fingerprint, date_trunc(:span, finished_at, 'UTC') AS start, count(*)
    FROM {_CHOSEN} CROSS JOIN LATERAL
        {_of_group("finished_at", "AND finished_at >= :since ORDER BY finished_at DESC LIMIT :ceiling")} AS latest
    GROUP BY 1, 2, 3
""")
TRACEBACK: Final = sql("SELECT last_error FROM ledger.ingest_task WHERE id = :id")


def list_groups(connection: Connection, order: GroupOrder = GroupOrder.LAST) -> DeadGroups:
    """Return the groups of all dead tasks, at most MOST_GROUPS."""
    rows = connection.execute(GROUP[order], {"ceiling": CEILING + 1}).all()
    dead = int(rows[0].dead) if rows else 0
    if dead <= CEILING:
        groups = [
            DeadGroup(GroupKey(row.type, row.fingerprint), _count(row.tasks), row.first_at, row.last_at) for row in rows
        ]
        return DeadGroups(groups, rows[0].groups if rows else 0, _count(dead))
    keys = [GroupKey(*row) for row in connection.execute(FIND)]
    groups = count_groups(connection, keys, ceiling=share_of_ceiling(keys))
    groups.sort(key=lambda each: each.last_at if order is GroupOrder.LAST else each.dead.count, reverse=True)
    estimates: dict[str, int] = dict(connection.execute(ESTIMATES).all())
    return DeadGroups(groups, len(keys), StatusCount(TaskStatus.DEAD, max(dead, estimates["dead"]), exact=False))


def count_groups(connection: Connection, keys: Sequence[GroupKey], *, ceiling: int = CEILING) -> list[DeadGroup]:
    """Count the dead tasks of these groups, each up to a ceiling. Groups without a dead task are left out."""
    rows = _of(connection, COUNT, keys, ceiling=ceiling)
    return [
        DeadGroup(GroupKey(type_, fingerprint), _count(tasks, exact=tasks < ceiling), first_at, last_at)
        for type_, fingerprint, tasks, first_at, last_at in rows
    ]


def share_of_ceiling(keys: Sequence[GroupKey]) -> int:
    """Return how many tasks of each group can be counted if there are more than CEILING."""
    return max(1, CEILING // max(1, len(keys)))


def read_latest(connection: Connection, keys: Sequence[GroupKey], *, limit: int) -> dict[GroupKey, list[ListedTask]]:
    """Return the tasks of each group that died last, the latest first."""
    found: dict[GroupKey, list[ListedTask]] = {key: [] for key in keys}
    for type_, fingerprint, *values in _of(connection, LATEST, keys, limit=limit):
        found[GroupKey(type_, fingerprint)].append(ListedTask(*values))
    return found


def read_deaths(
    connection: Connection,
    keys: Sequence[GroupKey],
    span: Literal["hour", "day"],
    since: datetime,
    *,
    ceiling: int = CEILING,
) -> dict[GroupKey, Deaths]:
    """Count the dead tasks of each group by the hour or day (UTC) in which they died, each up to a ceiling."""
    counts: dict[GroupKey, dict[datetime, int]] = {key: {} for key in keys}
    for type_, fingerprint, start, tasks in _of(connection, DEATHS, keys, span=span, since=since, ceiling=ceiling):
        counts[GroupKey(type_, fingerprint)][start.astimezone(UTC)] = tasks
    return {key: Deaths(found, sum(found.values()) < ceiling) for key, found in counts.items()}


def read_traceback(connection: Connection, task: ListedTask) -> str | None:
    """Return the traceback of a task's last error. It is for operators only."""
    return connection.execute(TRACEBACK, {"id": task.task_id}).scalar()


def _of(connection: Connection, statement: TextClause, keys: Sequence[GroupKey], **values: Any) -> Iterable[Any]:
    """Execute a statement for these groups. The types may come from an address, so they may have any character."""
    values |= {
        "types": array(storable(key.type) for key in keys),
        "fingerprints": array(storable(key.fingerprint) for key in keys),
    }
    return connection.execute(statement, values)


def _count(tasks: int, *, exact: bool = True) -> StatusCount:
    return StatusCount(TaskStatus.DEAD, tasks, exact)
