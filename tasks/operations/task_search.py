"""Search tasks in every state, page by page, without ever reading the whole history.

Each index is read in the order of the last change until a page is full, and at most `ceiling` of its tasks. A filter
that matches few of millions of tasks so ends after some thousand; the page says how far it has come, and the next one
goes on from there. What a page has not read it does not show: tasks beyond the place where one index was left are on
the next page, whichever index they are in.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Final

from sqlalchemy import Connection, TextClause

from models.driver_values import array_of_ids
from models.sql import sql
from tasks.core.due_times import KINDS
from tasks.core.registered_types import registered_type_names
from tasks.core.task_ids import keyed_id
from tasks.operations.listing import (
    MATCHES,
    Cursor,
    ListedTask,
    Source,
    TaskFilter,
    between,
    columns_of,
    cursor_values,
    match_values,
    narrowed,
    needed_sources,
)

CEILING: Final = 20_000  # tasks read from each index for one page
MOST_KEYED_IDS: Final = 20_000
MOST_WAITING_KINDS: Final = 1000  # queues and types of tasks that wait, to know their types
NO_ID: Final = uuid.UUID(int=0)
PRINCIPALS: Final = sql("SELECT name FROM ledger.api_token ORDER BY name")
# kinds: found one by one, so a ledger in which every task has a type of its own must not make each search slow.
WAITING_TYPES: Final = sql(f"WITH RECURSIVE {KINDS} SELECT type FROM kind LIMIT {MOST_WAITING_KINDS}")
HAVE_KEY: Final = sql("""
    SELECT id FROM ledger.ingest_task
    WHERE id = ANY(CAST(:ids AS uuid[])) AND idempotency_key = ANY(CAST(:keys AS text[]))
""")


@dataclass(frozen=True, slots=True)
class FoundTask(ListedTask):
    """A task as the search shows it."""

    partition_key: str | None


@dataclass(frozen=True, slots=True)
class SearchPage:
    """One page of the tasks that match. A cursor is None if there is nothing in that direction."""

    tasks: list[FoundTask]
    older: Cursor | None
    newer: Cursor | None
    is_cut: bool  # it ended because it had read `ceiling` tasks, not because it was full


def search(
    connection: Connection,
    chosen: TaskFilter,
    *,
    before: Cursor | None = None,
    after: Cursor | None = None,
    oldest_first: bool = False,
    limit: int = 50,
    ceiling: int = CEILING,
) -> SearchPage:
    """Return a page of tasks older than `before`, or newer than `after`, or the first one."""
    ascending = after is not None or (oldest_first and before is None)
    sources = needed_sources(chosen)
    values = {**match_values(chosen), **cursor_values(before, after), "limit": limit + 1, "ceiling": ceiling}
    rows = connection.execute(_page(chosen, sources, ascending=ascending), values).all()
    horizon = Cursor(*rows[0][:2]) if rows[0][1] else None
    found = [FoundTask(*row[2:]) for row in rows if row[2]]
    if horizon:
        found = [each for each in found if _comes_first(each.cursor, horizon, ascending=ascending)]
    tasks = found[:limit]
    further = tasks[-1].cursor if len(found) > limit else horizon
    given = after if ascending else before
    back = _neighbour(given, 1 if ascending else -1) if given else None
    older, newer = (back, further) if ascending else (further, back)
    if ascending is not oldest_first:
        tasks.reverse()
    return SearchPage(tasks, older, newer, is_cut=len(found) <= limit and horizon is not None)


def ids_with_key(connection: Connection, key: str, types: Iterable[str]) -> list[uuid.UUID]:
    """Return the tasks of these types with this idempotency key, also if it was given to the API.

    The id of a task with a key is computed from its type and key, so no index on the key is needed. The API puts the
    name of the token before the key.
    """
    keys = [key, *(f"{name}:{key}" for name in connection.execute(PRINCIPALS).scalars())]
    ids = islice((keyed_id(type_, each) for type_ in types for each in keys), MOST_KEYED_IDS)
    return list(connection.execute(HAVE_KEY, {"ids": array_of_ids(ids), "keys": keys}).scalars())


def known_types(connection: Connection) -> list[str]:
    """Return the types that workers have registered, and those of tasks that wait, which may be the first of many."""
    return sorted({*registered_type_names(connection), *connection.execute(WAITING_TYPES).scalars()})


def _page(chosen: TaskFilter, sources: Iterable[Source], *, ascending: bool) -> TextClause:
    """page: the first matches among the first tasks of each index, and the first place where reading had to end.

    An index has an end only if `ceiling` of its tasks come before the last match of a full page.
    """
    columns = columns_of(FoundTask)
    direction, is_before, never = ("ASC", "<=", "infinity") if ascending else ("DESC", ">=", "-infinity")
    order = f"ORDER BY changed_at {direction}, id {direction}"
    found, ends = [], []
    for each in sources:
        at = each.changed_at
        where, by_index = f"{narrowed(each, chosen)} AND {between(each)}", f"ORDER BY {at} {direction}, id {direction}"
        found.append(f"""
            (SELECT {columns}, changed_at FROM (
                SELECT *, {at} AS changed_at FROM ledger.ingest_task WHERE {where} {by_index} LIMIT :ceiling) AS first
             WHERE {MATCHES} {order} LIMIT :limit)""")
        ends.append(f"""
            (SELECT {at} AS changed_at, id FROM ledger.ingest_task
             WHERE {where} AND ({at}, id) {is_before} (coalesce((SELECT changed_at FROM last), '{never}'),
                                                       coalesce((SELECT id FROM last), '{NO_ID}'))
             {by_index} OFFSET :ceiling - 1 LIMIT 1)""")
    return sql(f"""
        WITH found AS MATERIALIZED (
            SELECT {columns}, changed_at FROM ({" UNION ALL ".join(found)}) AS each {order} LIMIT :limit),
        last AS MATERIALIZED (SELECT changed_at, id FROM found {order} OFFSET :limit - 1),
        horizon AS MATERIALIZED (
            SELECT changed_at AS horizon_at, id AS horizon_id FROM ({" UNION ALL ".join(ends)}) AS ends {order} LIMIT 1)
        SELECT horizon_at, horizon_id, {columns}
        FROM (SELECT true) AS always LEFT JOIN horizon ON true LEFT JOIN found ON true {order}
    """)


def _comes_first(cursor: Cursor, horizon: Cursor, *, ascending: bool) -> bool:
    """Return whether the cursor is not beyond the place where reading has ended."""
    place, end = _place(cursor), _place(horizon)
    return place <= end if ascending else place >= end


def _place(cursor: Cursor) -> tuple[datetime, uuid.UUID]:
    return cursor.changed_at, cursor.task_id


def _neighbour(cursor: Cursor, step: int) -> Cursor:
    """Return the cursor right beside: a page that goes back includes the place from which this one began."""
    number = min(max(cursor.task_id.int + step, 0), (1 << 128) - 1)
    return Cursor(cursor.changed_at, uuid.UUID(int=number))
