"""How much waits, where, and for how long: read from the indexes of unsent and dead events, never from the whole table.

Counts are exact up to a ceiling, so that a million waiting events cost a look no more than a hundred thousand do.
"""

# ruff: noqa: S608 - every piece is a literal of this file or of statements.py; values are parameters

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

_UNORDERED: Final = """SELECT greatest(created_at, next_retry_at) AS since FROM ledger.outbox_event
            WHERE destination = every.destination AND status IN ('NEW', 'RETRYING') AND ordering_key IS NULL"""
_ORDERED: Final = """SELECT greatest(created_at, next_retry_at) AS since FROM ledger.outbox_event
            WHERE destination = every.destination AND status IN ('NEW', 'RETRYING') AND ordering_key IS NOT NULL
              AND status <> 'SENT'"""
_DUE_AT: Final = "coalesce(next_retry_at, '-infinity')"
_NOW: Final = "(SELECT at FROM clock)"

# backlog: due and unsent; scheduled: unsent, and its time has not come (P17).
BACKLOG: Final = sql(f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at), {WAITING}
    SELECT every.destination, due.count + due_in_order.count, later.count + later_in_order.count,
           {_NOW} - least(due.oldest, due_in_order.oldest)
    FROM every CROSS JOIN LATERAL (
        SELECT count(*), min(since) AS oldest FROM (
            {_UNORDERED} AND {_DUE_AT} <= {_NOW} ORDER BY {_DUE_AT}, id LIMIT :ceiling) AS found) AS due
    CROSS JOIN LATERAL (
        SELECT count(*), min(since) AS oldest FROM (
            {_ORDERED} AND {_DUE_AT} <= {_NOW} LIMIT :ceiling) AS found) AS due_in_order
    CROSS JOIN LATERAL (SELECT count(*) FROM ({_UNORDERED} AND {_DUE_AT} > {_NOW} LIMIT :ceiling) AS found) AS later
    CROSS JOIN LATERAL (
        SELECT count(*) FROM ({_ORDERED} AND {_DUE_AT} > {_NOW} LIMIT :ceiling) AS found) AS later_in_order
    ORDER BY 1
""")

DEAD: Final = sql("""
    SELECT destination, count(*) FROM (SELECT destination FROM ledger.outbox_event WHERE status = 'DEAD' LIMIT :ceiling) AS d
    GROUP BY destination
""")

EVENTS: Final = sql("""
    SELECT id, destination, status, attempt_count, created_at, next_retry_at, sent_at, ordering_key, locked_by,
           external_id, last_error
    FROM ledger.outbox_event
    WHERE status = ANY(CAST(:statuses AS text[]))
      AND (CAST(:destination AS text) IS NULL OR destination = :destination)
      AND (CAST(:before AS bigint) IS NULL OR id < :before)
    ORDER BY id DESC LIMIT :limit
""")


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits for one destination. A count of CEILING or more means: at least so many."""

    destination: str
    due: int = 0
    scheduled: int = 0
    oldest_due: timedelta | None = None
    dead: int = 0


@dataclass(frozen=True, slots=True)
class ListedEvent:
    """An event for a list: everything but what it carries."""

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


def backlog(connection: Connection) -> list[Backlog]:
    """Every destination for which something waits or is dead, by name."""
    found = {row[0]: Backlog(*row) for row in connection.execute(BACKLOG, _LOOK)}
    for name, dead in connection.execute(DEAD, _LOOK):
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
    """The newest first; `before` is the last id of the page before."""
    values = {"statuses": list(statuses), "destination": destination, "before": before, "limit": limit}
    return [ListedEvent(*row) for row in connection.execute(EVENTS, values)]


_LOOK: Final = {"ceiling": CEILING}
