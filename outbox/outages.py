"""What the ledger knows about destinations that give no answer, and when each destination last took an event.

The circuits of a destination are in the memory of the processes that publish to it. The ledger has their traces: the
events that were the probes are RETRYING with an error that begins with `unreachable: `, and the audit has each probe.
A dead wake-up is probed, too. Times of answers come from the tally: they are exact to the minute within the last hour,
to the hour within two days, and to the day before that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import Connection

from models.sql import sql
from outbox.audit import AuditCode
from outbox.circuit import wait_seconds
from outbox.lease_statements import UNREACHABLE

MOST_PROBES: Final = 500  # that are looked at for one destination
_IS_PUBLISHED: Final = "subject = 'publish' AND result = 'success'"

# last_sent: when each destination last took an event, as the tally knows it.
LAST_SENT: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at)
    SELECT queue, max(start) FROM (
        SELECT queue, start FROM ledger.tally_period
        WHERE span = 'minute' AND start >= (SELECT at FROM clock) - interval '1 hour' AND {_IS_PUBLISHED}
        UNION ALL
        SELECT queue, start FROM ledger.tally_period
        WHERE span = 'hour' AND start >= (SELECT at FROM clock) - interval '2 days' AND {_IS_PUBLISHED}
        UNION ALL
        SELECT queue, start FROM ledger.tally_period
        WHERE span = 'day' AND start >= (SELECT at FROM clock) - interval '90 days' AND {_IS_PUBLISHED}
        UNION ALL
        SELECT queue, minute FROM ledger.task_tally WHERE {_IS_PUBLISHED}) AS sent
    GROUP BY queue
""")
# outages: the probes of each destination since it last answered, and when the events that wait for it are due.
OUTAGES: Final = sql(f"""
    SELECT given.destination, tried.count, tried.first_at, tried.last_at, held.next_at, held.error
    FROM unnest(CAST(:names AS text[]), CAST(:answered AS timestamptz[])) AS given(destination, answered_at)
    CROSS JOIN LATERAL (
        SELECT array_agg(id) AS ids, min(next_retry_at) AS next_at,
               (array_agg(last_error ORDER BY next_retry_at DESC NULLS LAST))[1] AS error
        FROM (SELECT id, next_retry_at, last_error FROM ledger.outbox_event e
              WHERE e.destination = given.destination AND e.last_error LIKE '{UNREACHABLE}%'
                AND (e.status = 'RETRYING' OR e.status = 'DEAD' AND e.destination LIKE 'celery:%')
              LIMIT {MOST_PROBES}) AS probe) AS held
    CROSS JOIN LATERAL (
        SELECT count(*) AS count, min(created_at) AS first_at, max(created_at) AS last_at
        FROM ledger.outbox_audit
        WHERE outbox_id = ANY(held.ids) AND detail LIKE '{UNREACHABLE}%'
          AND code IN ('{AuditCode.RETRY}', '{AuditCode.DEAD}')
          AND created_at >= coalesce(given.answered_at, '-infinity')) AS tried
    WHERE tried.count > 0
""")


@dataclass(frozen=True, slots=True)
class Outage:
    """A destination that gave no answer when it was last tried."""

    destination: str
    tries: int
    since: datetime  # the first try without an answer
    last_try: datetime
    next_due: datetime | None  # when the next of the events that were tried is due; None: only dead wake-ups are left
    error: str

    def next_try(self, *, has_due: bool) -> datetime:
        """Return about when it is tried again: the circuit of the process that tried it waits for an event, too.

        `has_due`: other events are due.
        """
        circuit = self.last_try + timedelta(seconds=wait_seconds(self.tries))
        return circuit if has_due or self.next_due is None else max(circuit, self.next_due)


def read_last_sent(connection: Connection) -> dict[str, datetime]:
    """Return when each destination last took an event, by its name."""
    return {name: at for name, at in connection.execute(LAST_SENT)}  # noqa: C416 - rows are not pairs to mypy


def read_outages(
    connection: Connection, destinations: Collection[str], last_sent: dict[str, datetime]
) -> dict[str, Outage]:
    """Return those of the destinations that are unreachable, by name, as far as the ledger knows."""
    names = list(destinations)
    values = {"names": names, "answered": [last_sent.get(name) for name in names]}
    return {row[0]: Outage(*row) for row in connection.execute(OUTAGES, values)}
