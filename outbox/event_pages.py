"""Lists of events for people, page by page, the newest first; and one event with its history.

Each list reads an index of its own, and no more of it than a page needs. Unsent events are indexed by destination and
due time, so their ids are collected and sorted. Sent events have no index by destination: a page looks at the next
WINDOW events by id, so it may be short and have a next page all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Connection

from models.sql import sql
from outbox.backlog import LISTED, ListedEvent

PAGE: Final = 50
WINDOW: Final = 20_000
MOST_AUDITS: Final = 100
LARGEST_ID: Final = 2**63 - 1

_OF_DESTINATION: Final = "(CAST(:destination AS text) IS NULL OR destination = :destination)"


def _unsent(condition: str, in_order: str) -> str:
    """Return a statement for a page of unsent events. Materialized: the planner would walk all events by id instead."""
    return f"""
    WITH unsent AS MATERIALIZED (
        SELECT id FROM ledger.outbox_event
        WHERE status IN ('NEW', 'RETRYING') AND ordering_key IS NULL AND {condition}
          AND {_OF_DESTINATION} AND id < :before
        UNION ALL
        SELECT id FROM ledger.outbox_event
        WHERE status <> 'SENT' AND ordering_key IS NOT NULL AND {in_order} AND {_OF_DESTINATION} AND id < :before)
    SELECT {LISTED} FROM ledger.outbox_event
    WHERE id IN (SELECT id FROM unsent ORDER BY id DESC LIMIT :limit) ORDER BY id DESC
"""


# waiting: events that are not published yet, whether they failed or not.
WAITING: Final = sql(_unsent("true", "status IN ('NEW', 'RETRYING')"))
# retrying: those of them that failed. Each of them has a time, so the index leads to them.
RETRYING: Final = sql(
    _unsent("status = 'RETRYING' AND coalesce(next_retry_at, '-infinity') > '-infinity'", "status = 'RETRYING'")
)
DEAD: Final = sql(f"""
    SELECT {LISTED} FROM ledger.outbox_event
    WHERE status = 'DEAD' AND {_OF_DESTINATION} AND id < :before
      AND (CAST(:error AS text) IS NULL OR position(lower(:error) IN lower(last_error)) > 0)
    ORDER BY id DESC LIMIT :limit
""")
SENT: Final = sql(f"""
    SELECT {LISTED} FROM (
        SELECT {LISTED} FROM ledger.outbox_event WHERE id < :before ORDER BY id DESC LIMIT :window) AS latest
    WHERE status = 'SENT' AND {_OF_DESTINATION} ORDER BY id DESC LIMIT :limit
""")
# window: the last id that a page of sent events looks at, if there are older ones.
END_OF_WINDOW: Final = sql("""
    SELECT id FROM ledger.outbox_event WHERE id < :before ORDER BY id DESC OFFSET :window - 1 LIMIT 1
""")
EVENT: Final = sql(f"""
    SELECT {LISTED}, payload, headers, lease_until, dedup_key
    FROM ledger.outbox_event WHERE id = :id
""")
AUDITS: Final = sql("""
    SELECT code, worker_id, detail, created_at FROM ledger.outbox_audit
    WHERE outbox_id = :id ORDER BY created_at DESC, id DESC LIMIT :limit
""")


class Kind(StrEnum):
    """The lists of events."""

    WAITING = "waiting"
    RETRYING = "retrying"
    DEAD = "dead"
    SENT = "sent"


STATEMENTS: Final = {Kind.WAITING: WAITING, Kind.RETRYING: RETRYING, Kind.DEAD: DEAD, Kind.SENT: SENT}


@dataclass(frozen=True, slots=True)
class EventPage:
    """A page of a list. The next page has ids below `older`; None: there is none."""

    events: Sequence[ListedEvent]
    older: int | None


@dataclass(frozen=True, slots=True)
class Audit:
    """What a process or an operator did with an event."""

    code: str
    worker_id: str
    detail: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event with its payload and its latest audits. `event` is None if it was discarded or pruned."""

    event: ListedEvent | None
    payload: Any
    headers: dict[str, Any]
    lease_until: datetime | None
    dedup_key: str | None
    audits: Sequence[Audit]

    @property
    def task_ids(self) -> list[str]:
        """Return the tasks that a wake-up names."""
        is_wakeup = self.event is not None and self.event.destination.startswith("celery:")
        ids = self.payload.get("ids") if is_wakeup and isinstance(self.payload, dict) else None
        return [each for each in ids if isinstance(each, str)] if isinstance(ids, list) else []


def read_page(
    connection: Connection,
    kind: Kind,
    *,
    destination: str | None = None,
    error: str | None = None,
    before: int = LARGEST_ID,
    limit: int = PAGE,
) -> EventPage:
    """Return a page. `error` is a part of the error of dead events, ignoring case."""
    values = {"destination": destination, "error": error, "before": before, "limit": limit, "window": WINDOW}
    found = [ListedEvent(*row) for row in connection.execute(STATEMENTS[kind], values)]
    if len(found) == limit:
        return EventPage(found, found[-1].id)
    looks_further = kind is Kind.SENT
    return EventPage(found, connection.execute(END_OF_WINDOW, values).scalar() if looks_further else None)


def read_event(connection: Connection, id_: int) -> StoredEvent | None:
    """Return an event with its audits; None if neither is in the ledger."""
    if not 0 < id_ <= LARGEST_ID:
        return None
    row = connection.execute(EVENT, {"id": id_}).one_or_none()
    audits = [Audit(*each) for each in connection.execute(AUDITS, {"id": id_, "limit": MOST_AUDITS})]
    if row is None:
        return StoredEvent(None, None, {}, None, None, audits) if audits else None
    payload, headers, lease_until, dedup_key = row[-4:]
    return StoredEvent(ListedEvent(*row[:-4]), payload, headers, lease_until, dedup_key, audits)
