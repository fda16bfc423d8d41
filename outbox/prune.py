"""Pruning: delete SENT events after their retention, in small batches that each are a short transaction.

Their audit rows are deleted with them. NEW, RETRYING and DEAD events are never pruned. Duplicates are recognised for as
long as the retention lasts.
"""

from __future__ import annotations

import time
from typing import Final

from sqlalchemy import Engine

from models.sql import sql

BATCH: Final = 1000

# prune: SENT for longer than the retention → deleted, the oldest first, skipping rows that others lock.
PRUNE: Final = sql("""
    WITH old AS MATERIALIZED (
        SELECT id FROM ledger.outbox_event
        WHERE status = 'SENT' AND sent_at < (SELECT ledger.ledger_now()) - make_interval(hours => :hours)
        ORDER BY sent_at LIMIT :batch FOR UPDATE SKIP LOCKED),
    gone AS (DELETE FROM ledger.outbox_event e USING old WHERE e.id = old.id RETURNING e.id),
    audits AS (DELETE FROM ledger.outbox_audit a USING gone WHERE a.outbox_id = gone.id)
    SELECT count(*) FROM gone
""")

# Database errors of a relay belong to no event: they are pruned by their own age.
PRUNE_AUDITS: Final = sql("""
    DELETE FROM ledger.outbox_audit
    WHERE outbox_id IS NULL AND created_at < (SELECT ledger.ledger_now()) - make_interval(hours => :hours)
""")


def prune(engine: Engine, *, hours: int, budget_seconds: float = 5.0) -> int:
    """Delete old events until none is left or the time is over; return how many were deleted."""
    deadline = time.monotonic() + budget_seconds
    events, last = 0, BATCH
    while last == BATCH and time.monotonic() < deadline:
        with engine.begin() as connection:
            last = connection.execute(PRUNE, {"hours": hours, "batch": BATCH}).scalar_one()
        events += last
    with engine.begin() as connection:
        connection.execute(PRUNE_AUDITS, {"hours": hours})
    return events
