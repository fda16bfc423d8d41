"""The backlog: how many events wait for each destination, and for how long.

The counts come from the indexes of unsent and dead events, never from the whole table. They are exact up to a ceiling,
so that a million waiting events cost no more than a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import Connection

from models.sql import sql
from models.status import EventStatus
from outbox.lease_statements import WAITING

CEILING: Final = 100_000
_DUE_AT: Final = "coalesce(next_retry_at, '-infinity')"
_NOW: Final = "(SELECT at FROM clock)"


def _counted(condition: str, order: str = "") -> str:
    """Return a LATERAL query that counts unsent events of a destination and finds the one that waits longest."""
    return f"""CROSS JOIN LATERAL (
        SELECT count(*), min(since) AS oldest FROM (
            SELECT greatest(created_at, next_retry_at) AS since FROM ledger.outbox_event
            WHERE destination = waiting.destination AND status IN ('NEW', 'RETRYING') AND {condition}
            {order} LIMIT :ceiling) AS found)"""


# One query per index: unordered events, and ordered ones. The first index is sorted by due time.
_UNORDERED: Final = "ordering_key IS NULL"
_ORDERED: Final = "ordering_key IS NOT NULL AND status <> 'SENT'"

# backlog: due and unsent; scheduled: unsent and not yet due.
BACKLOG: Final = sql(f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at), {WAITING}
    SELECT waiting.destination, due.count + due_in_order.count, later.count + later_in_order.count,
           {_NOW} - least(due.oldest, due_in_order.oldest)
    FROM waiting
    {_counted(f"{_UNORDERED} AND {_DUE_AT} <= {_NOW}", f"ORDER BY {_DUE_AT}, id")} AS due
    {_counted(f"{_ORDERED} AND {_DUE_AT} <= {_NOW}")} AS due_in_order
    {_counted(f"{_UNORDERED} AND {_DUE_AT} > {_NOW}")} AS later
    {_counted(f"{_ORDERED} AND {_DUE_AT} > {_NOW}")} AS later_in_order
    ORDER BY 1
""")

DEAD: Final = sql("""
    SELECT destination, count(*)
    FROM (SELECT destination FROM ledger.outbox_event WHERE status = 'DEAD' LIMIT :ceiling) AS dead GROUP BY destination
""")

# The columns of `ListedEvent`.
LISTED: Final = """id, destination, status, attempt_count, created_at, next_retry_at, sent_at, ordering_key, locked_by,
           external_id, last_error"""
EVENTS: Final = sql(f"""
    SELECT {LISTED}
    FROM ledger.outbox_event
    WHERE status = ANY(CAST(:statuses AS text[]))
      AND (CAST(:destination AS text) IS NULL OR destination = :destination)
      AND (CAST(:before AS bigint) IS NULL OR id < :before)
    ORDER BY id DESC LIMIT :limit
""")


@dataclass(frozen=True, slots=True)
class Backlog:
    """The waiting and dead events of one destination. A count of CEILING means: at least that many."""

    destination: str
    due: int = 0
    scheduled: int = 0
    oldest_due: timedelta | None = None
    dead: int = 0


@dataclass(frozen=True, slots=True)
class ListedEvent:
    """An event without its payload and headers, for a list."""

    id: int
    destination: str
    status: EventStatus
    attempt_count: int
    created_at: datetime
    next_retry_at: datetime | None
    sent_at: datetime | None
    ordering_key: str | None
    locked_by: str | None
    external_id: str | None
    last_error: str | None


def backlog(connection: Connection, *, ceiling: int = CEILING) -> list[Backlog]:
    """Return every destination that has waiting or dead events, by name. A count of `ceiling` means: at least."""
    values = {"ceiling": ceiling}
    found = {row[0]: Backlog(*row) for row in connection.execute(BACKLOG, values)}
    for name, dead in connection.execute(DEAD, values):
        found[name] = replace(found.get(name, Backlog(name)), dead=dead)
    return [found[name] for name in sorted(found)]


def events(
    connection: Connection,
    *,
    statuses: Sequence[EventStatus],
    destination: str | None = None,
    before: int | None = None,
    limit: int = 50,
) -> list[ListedEvent]:
    """Return events, the newest first. `before` is the last id of the previous page."""
    values = {"statuses": list(statuses), "destination": destination, "before": before, "limit": limit}
    return [ListedEvent(*row) for row in connection.execute(EVENTS, values)]
