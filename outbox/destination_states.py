"""What operators see of each destination: what waits, what is retried or dead, and whether it answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection

from models.sql import sql
from outbox.backlog import Backlog, backlog
from outbox.outages import Outage, read_last_sent, read_outages

CEILING: Final = 10_000  # counting stops here, so that a page is made as fast with a million events

# retrying: how many of a destination's events have failed. Of very many scheduled events the first ones are looked at.
RETRYING: Final = sql("""
    SELECT name, loose.count + in_order.count AS number
    FROM unnest(CAST(:names AS text[])) AS name
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE status = 'RETRYING') AS count FROM (
            SELECT status FROM ledger.outbox_event
            WHERE destination = name AND status IN ('NEW', 'RETRYING') AND ordering_key IS NULL
              AND coalesce(next_retry_at, '-infinity') > '-infinity'
            ORDER BY coalesce(next_retry_at, '-infinity'), id LIMIT :ceiling) AS first) AS loose
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE status = 'RETRYING') AS count FROM (
            SELECT status FROM ledger.outbox_event
            WHERE destination = name AND ordering_key IS NOT NULL AND status <> 'SENT'
            ORDER BY ordering_key, id LIMIT :ceiling) AS first) AS in_order
""")


@dataclass(frozen=True, slots=True)
class DestinationState:
    """A destination: its events, and whether it answers. A count of CEILING means: at least that many."""

    backlog: Backlog
    retrying: int
    last_sent: datetime | None  # about when it last took an event (outages.py)
    outage: Outage | None

    @property
    def name(self) -> str:
        return self.backlog.destination


def read_destination_states(connection: Connection, configured: Iterable[str]) -> list[DestinationState]:
    """Return every destination that is configured, or has events that are waiting or dead, by name."""
    waiting = {each.destination: each for each in backlog(connection, ceiling=CEILING)}
    last_sent = read_last_sent(connection)
    found = {name: waiting.get(name, Backlog(name)) for name in sorted({*waiting, *configured})}
    values = {"names": list(found), "ceiling": CEILING}
    retrying = {row.name: row.number for row in connection.execute(RETRYING, values)}
    outages = read_outages(connection, found, last_sent)
    return [
        DestinationState(each, retrying.get(name, 0), last_sent.get(name), outages.get(name))
        for name, each in found.items()
    ]
