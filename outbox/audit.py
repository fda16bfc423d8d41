"""What became of each attempt, by the seed's codes: counted always, written to `outbox_audit` where it tells something.

A success of a wake-up is counted and not written: the event itself says SENT, and the task's history says the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

import metrics
from models.sql import sql


class FlushCode(StrEnum):
    """The codes of the seed, section 8."""

    SUCCESS = "outbox_flush_success"
    RETRY = "outbox_flush_retry"
    DEAD = "outbox_flush_dead"
    CONFLICT = "outbox_flush_conflict"
    DEDUP_HIT = "outbox_flush_dedup_hit"
    DB_TIMEOUT = "outbox_flush_db_timeout"
    DB_ERROR = "outbox_flush_db_error"


QUERY_CANCELED: Final = "57014"

AUDIT: Final = sql("""
    INSERT INTO ledger.outbox_audit (outbox_id, code, worker_id, detail)
    SELECT id, :code, :worker_id, detail
    FROM unnest(CAST(:ids AS bigint[]), CAST(:details AS text[])) AS given(id, detail)
""")

# What a refused holder finds: the row as somebody else left it, or nothing.
AUDIT_CONFLICTS: Final = sql("""
    INSERT INTO ledger.outbox_audit (outbox_id, code, worker_id, detail)
    SELECT given.id, :code, :worker_id,
           CASE WHEN e.id IS NULL THEN 'the event is gone'
                ELSE format('%s: now %s, held by %s until %s', CAST(:during AS text), e.status,
                            coalesce(e.locked_by, 'nobody'), coalesce(e.lease_until::text, '-')) END
    FROM unnest(CAST(:ids AS bigint[])) AS given(id) LEFT JOIN ledger.outbox_event e USING (id)
""")


def count(code: FlushCode, how_many: int) -> None:
    if how_many:
        metrics.OUTBOX_FLUSH_TOTAL.labels(code).inc(how_many)


def write(connection: Connection, code: FlushCode, details: Mapping[int | None, str], *, worker_id: str) -> None:
    """One audit row per event; None is an error that concerns no single one."""
    if details:
        values = {"ids": list(details), "details": list(details.values()), "code": code, "worker_id": worker_id}
        connection.execute(AUDIT, values)


def write_conflicts(connection: Connection, ids: Sequence[int], during: str, *, worker_id: str) -> None:
    """The lease was lost: what is there now, for whoever asks later."""
    if ids:
        values = {"ids": list(ids), "during": during, "code": FlushCode.CONFLICT, "worker_id": worker_id}
        connection.execute(AUDIT_CONFLICTS, values)


def code_of(error: DBAPIError) -> FlushCode:
    """P22: a statement that was cancelled took too long; everything else is an error of the database."""
    is_timeout = getattr(error.orig, "pgcode", None) == QUERY_CANCELED
    return FlushCode.DB_TIMEOUT if is_timeout else FlushCode.DB_ERROR
