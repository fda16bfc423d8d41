"""Requeue or discard DEAD outbox events.

    DEAD ──requeue──► NEW      attempts start again; the audit keeps who did it, why, and the last error
    DEAD ──discard──► deleted  the audit stays

A DEAD event with an `ordering_key` blocks the later events of that key. Both actions unblock them
(docs/protocol.md, Order).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from models.sql import sql
from outbox.dead_rows import DeadRows, Filters

_CHOSEN: Final = """status = 'DEAD'
    AND (CAST(:ids AS bigint[]) IS NULL OR id = ANY(CAST(:ids AS bigint[])))
    AND (CAST(:destination AS text) IS NULL OR destination = :destination)
    AND (CAST(:error AS text) IS NULL OR position(lower(:error) IN lower(last_error)) > 0)
    AND (CAST(:since AS timestamptz) IS NULL OR created_at >= :since)
    AND (CAST(:until AS timestamptz) IS NULL OR created_at < :until)"""
_FIRST_LINE: Final = "left(split_part(coalesce(last_error, ''), chr(10), 1), 120)"

_HELD: Final = f"""
    WITH held AS MATERIALIZED (
        SELECT id, attempt_count, last_error FROM ledger.outbox_event WHERE {_CHOSEN} AND id > :after_id
        ORDER BY id LIMIT :batch FOR UPDATE SKIP LOCKED),
    audits AS (
        INSERT INTO ledger.outbox_audit (outbox_id, code, worker_id, detail)
        SELECT id, :code, :actor, concat_ws('; ', CAST(:reason AS text),
               format('failures: %s, last error: %s', attempt_count, coalesce(last_error, 'none')))
        FROM held)"""
_CHANGED: Final = "SELECT array_agg(id ORDER BY id) AS changed, max(id) AS after_id FROM held"

# requeue: DEAD → NEW, due at once, attempts start again.
REQUEUE: Final = sql(f"""{_HELD},
    back AS (
        UPDATE ledger.outbox_event e
        SET status = 'NEW', attempt_count = 0, next_retry_at = NULL, locked_by = NULL, locked_at = NULL
        FROM held WHERE e.id = held.id)
    {_CHANGED}
""")
# discard: DEAD → deleted.
DISCARD: Final = sql(f"""{_HELD},
    gone AS (DELETE FROM ledger.outbox_event e USING held WHERE e.id = held.id)
    {_CHANGED}
""")


@dataclass(frozen=True, slots=True)
class Choice(Filters):
    """Filters for DEAD events."""

    ids: list[int] | None = None
    destination: str | None = None
    error: str | None = None  # part of the last error, ignoring case
    since: datetime | None = None  # created at or after
    until: datetime | None = None  # created before


@dataclass(frozen=True, slots=True)
class DeadCount:
    """The number of events with one destination and one error."""

    destination: str
    error: str
    count: int


EVENTS: Final[DeadRows[int, DeadCount]] = DeadRows(
    table="outbox_event",
    chosen=_CHOSEN,
    order="id",
    columns=f"destination, {_FIRST_LINE} AS error",
    group=DeadCount,
    start=lambda _connection: {"after_id": 0},
)
count = EVENTS.count
requeue = partial(EVENTS.in_batches, REQUEUE, code="outbox_requeued")
discard = partial(EVENTS.in_batches, DISCARD, code="outbox_discarded")
