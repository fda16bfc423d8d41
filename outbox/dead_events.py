"""Requeue or discard DEAD outbox events, in small batches that are safe to interrupt and to repeat.

    DEAD ──requeue──► NEW      attempts start again; the audit keeps who did it, why, and the last error
    DEAD ──discard──► deleted  the audit stays

A DEAD event with an `ordering_key` blocks the later events of that key. Both actions unblock them
(docs/protocol.md, Order).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, Engine, TextClause

from models.sql import sql

BATCH: Final = 500
MAX_GROUPS: Final = 100

_CHOSEN: Final = """status = 'DEAD'
    AND (CAST(:ids AS bigint[]) IS NULL OR id = ANY(CAST(:ids AS bigint[])))
    AND (CAST(:destination AS text) IS NULL OR destination = :destination)
    AND (CAST(:error AS text) IS NULL OR position(lower(:error) IN lower(last_error)) > 0)
    AND (CAST(:since AS timestamptz) IS NULL OR created_at >= :since)
    AND (CAST(:until AS timestamptz) IS NULL OR created_at < :until)"""

# count: by destination and first line of the error, most frequent first. The last column is the total of all groups.
COUNT: Final = sql(f"""
    SELECT destination, left(split_part(coalesce(last_error, ''), chr(10), 1), 120), count(*),
           CAST(sum(count(*)) OVER () AS bigint)
    FROM (SELECT destination, last_error FROM ledger.outbox_event WHERE {_CHOSEN} ORDER BY id LIMIT :limit) AS oldest
    GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2 LIMIT :max_groups
""")

_NEXT: Final = f"""
    WITH dead AS MATERIALIZED (
        SELECT id, attempt_count, last_error FROM ledger.outbox_event WHERE {_CHOSEN} AND id > :above
        ORDER BY id LIMIT :batch FOR UPDATE SKIP LOCKED),
    audits AS (
        INSERT INTO ledger.outbox_audit (outbox_id, code, worker_id, detail)
        SELECT id, :code, :actor, concat_ws('; ', CAST(:reason AS text),
               format('failures: %s, last error: %s', attempt_count, coalesce(last_error, 'none')))
        FROM dead)"""

# requeue: DEAD → NEW, due at once, attempts start again.
REQUEUE: Final = sql(f"""{_NEXT}
    UPDATE ledger.outbox_event e SET status = 'NEW', attempt_count = 0, next_retry_at = NULL
    FROM dead WHERE e.id = dead.id RETURNING e.id
""")
# discard: DEAD → deleted.
DISCARD: Final = sql(f"""{_NEXT}
    DELETE FROM ledger.outbox_event e USING dead WHERE e.id = dead.id RETURNING e.id
""")


@dataclass(frozen=True, slots=True)
class Choice:
    """Filters for DEAD events. Without a filter, all are chosen."""

    ids: list[int] | None = None
    destination: str | None = None
    error: str | None = None  # part of the last error, ignoring case
    since: datetime | None = None  # created at or after
    until: datetime | None = None  # created before

    @property
    def is_all(self) -> bool:
        return self == Choice()


@dataclass(frozen=True, slots=True)
class DeadCount:
    """The number of events with one destination and one error."""

    destination: str
    error: str
    count: int


@dataclass(frozen=True, slots=True)
class Counted:
    """The number of chosen events, and the largest groups among them."""

    total: int
    groups: list[DeadCount]


def count(connection: Connection, choice: Choice, *, limit: int | None = None) -> Counted:
    """Count the chosen events. With a limit, count only those that `requeue` and `discard` would take first."""
    values = {**dataclasses.asdict(choice), "limit": limit, "max_groups": MAX_GROUPS}
    rows = connection.execute(COUNT, values).all()
    return Counted(int(rows[0][-1]) if rows else 0, [DeadCount(*row[:-1]) for row in rows])


def _in_batches(
    statement: TextClause,
    code: str,
    engine: Engine,
    choice: Choice,
    *,
    actor: str,
    reason: str | None = None,
    limit: int | None = None,
    batch: int = BATCH,
) -> Iterator[list[int]]:
    """Change the chosen events, oldest first; yield the ids of each batch after its commit."""
    values: dict[str, Any] = {**dataclasses.asdict(choice), "code": code, "actor": actor, "reason": reason}
    done, above = 0, 0
    while limit is None or done < limit:
        values |= {"above": above, "batch": batch if limit is None else min(batch, limit - done)}
        with engine.begin() as connection:
            ids = list(connection.execute(statement, values).scalars())
        if not ids:
            return
        done, above = done + len(ids), max(ids)
        yield ids


requeue = partial(_in_batches, REQUEUE, "outbox_requeued")
discard = partial(_in_batches, DISCARD, "outbox_discarded")
