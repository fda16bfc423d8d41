"""What an operator does with DEAD events: look, requeue, discard. In small batches, safe to interrupt and to repeat.

    DEAD ──requeue──► NEW   attempts start again; the audit keeps who, why and the last error
    DEAD ──discard──► gone  the audit row stays

A DEAD event with an `ordering_key` holds its key; both set it free (P20).
"""

# ruff: noqa: S608 - every piece is a literal of this file; values are parameters

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Engine

from models.sql import sql

BATCH: Final = 500
REQUEUED: Final = "outbox_requeued"
DISCARDED: Final = "outbox_discarded"

_CHOSEN: Final = """status = 'DEAD'
    AND (CAST(:ids AS bigint[]) IS NULL OR id = ANY(CAST(:ids AS bigint[])))
    AND (CAST(:destination AS text) IS NULL OR destination = :destination)
    AND (CAST(:error AS text) IS NULL OR position(lower(:error) IN lower(last_error)) > 0)
    AND (CAST(:since AS timestamptz) IS NULL OR created_at >= :since)
    AND (CAST(:until AS timestamptz) IS NULL OR created_at < :until)"""

# count: by destination and error, the most frequent first. With a limit, those that a requeue would take: the oldest.
_COUNT: Final = """
    SELECT destination, left(split_part(coalesce(last_error, ''), chr(10), 1), 120) AS error, count(*)
    FROM {} GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2
"""
COUNT: Final = sql(_COUNT.format(f"outbox_event WHERE {_CHOSEN}"))
COUNT_FIRST: Final = sql(
    _COUNT.format(f"(SELECT * FROM ledger.outbox_event WHERE {_CHOSEN} ORDER BY id LIMIT :limit) AS first")
)

_NEXT: Final = f"""
    WITH dead AS MATERIALIZED (
        SELECT id, attempt_count, last_error FROM ledger.outbox_event WHERE {_CHOSEN} AND id > :above
        ORDER BY id LIMIT :batch FOR UPDATE SKIP LOCKED)"""
_AUDIT: Final = """
    audits AS (
        INSERT INTO ledger.outbox_audit (outbox_id, code, worker_id, detail)
        SELECT id, :code, :actor, concat_ws('; ', CAST(:reason AS text),
               format('after %s attempts: %s', attempt_count, coalesce(last_error, 'no error')))
        FROM dead)"""

# requeue: DEAD → NEW, due at once, attempts start again.
REQUEUE: Final = sql(f"""{_NEXT}, {_AUDIT}
    UPDATE ledger.outbox_event e SET status = 'NEW', attempt_count = 0, next_retry_at = NULL
    FROM dead WHERE e.id = dead.id RETURNING e.id
""")
# discard: DEAD → gone.
DISCARD: Final = sql(f"""{_NEXT}, {_AUDIT}
    DELETE FROM ledger.outbox_event e USING dead WHERE e.id = dead.id RETURNING e.id
""")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which DEAD events. Nothing given: all."""

    ids: list[int] | None = None
    destination: str | None = None
    error: str | None = None  # a part of the last error, in any case
    since: datetime | None = None  # created
    until: datetime | None = None

    @property
    def is_all(self) -> bool:
        return self == Choice()


@dataclass(frozen=True, slots=True)
class DeadCount:
    """How many of one kind."""

    destination: str
    error: str
    count: int


def count(connection: Connection, choice: Choice, *, limit: int | None = None) -> list[DeadCount]:
    """With a limit, of those that `requeue` and `discard` take first."""
    values = {**dataclasses.asdict(choice), "limit": limit}
    return [DeadCount(*row) for row in connection.execute(COUNT if limit is None else COUNT_FIRST, values)]


def requeue(
    engine: Engine, choice: Choice, *, actor: str, reason: str | None = None, limit: int | None = None
) -> Iterator[int]:
    """Yields how many were requeued so far, after each batch."""
    return _in_batches(engine, choice, limit, {"actor": actor, "reason": reason, "code": REQUEUED})


def discard(
    engine: Engine, choice: Choice, *, actor: str, reason: str | None = None, limit: int | None = None
) -> Iterator[int]:
    """Yields how many were discarded so far, after each batch."""
    return _in_batches(engine, choice, limit, {"actor": actor, "reason": reason, "code": DISCARDED})


def _in_batches(engine: Engine, choice: Choice, limit: int | None, values: dict[str, Any]) -> Iterator[int]:
    statement = REQUEUE if values["code"] == REQUEUED else DISCARD
    done, above = 0, 0
    while limit is None or done < limit:
        batch = BATCH if limit is None else min(BATCH, limit - done)
        with engine.begin() as connection:
            values |= {**dataclasses.asdict(choice), "above": above, "batch": batch}
            ids = connection.execute(statement, values).scalars().all()
        if not ids:
            return
        done, above = done + len(ids), max(ids)
        yield done
