"""Transactions in doubt: they have no decision, or their two-phase sink has not confirmed that it obeyed.

A transaction is here for a moment in every attempt. It is left here if its worker died, or its sink is unreachable.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import Connection

from models.sinks import Decision, SinkState
from models.sql import sql

CEILING: Final = 10_000  # counting stops here

_UNFINISHED: Final = "state NOT IN ('committed', 'aborted')"
COUNTS: Final = sql(f"""
    SELECT sink, count(*), (SELECT ledger.ledger_now()) - min(created_at)
    FROM (SELECT sink, created_at FROM ledger.sink_transaction WHERE {_UNFINISHED}
          ORDER BY created_at LIMIT :ceiling) AS oldest
    GROUP BY sink ORDER BY sink
""")
# in_doubt: the oldest, and whether the attempt that began each one still has its lease.
IN_DOUBT: Final = sql(f"""
    SELECT oldest.gid, oldest.sink, oldest.task_id, task.type, oldest.decision, oldest.state,
           (SELECT ledger.ledger_now()) - oldest.created_at,
           CASE WHEN oldest.task_id IS NOT NULL THEN coalesce(task.lease_token = oldest.lease_token, false)
                ELSE EXISTS (SELECT FROM ledger.shard_lease AS shard
                             WHERE shard.lease_token = oldest.lease_token
                               AND shard.lease_until > (SELECT ledger.ledger_now())) END
    FROM (SELECT gid, sink, task_id, decision, state, created_at, lease_token FROM ledger.sink_transaction
          WHERE {_UNFINISHED} ORDER BY created_at, gid LIMIT :most) AS oldest
    LEFT JOIN ledger.ingest_task AS task ON task.id = oldest.task_id
    ORDER BY oldest.created_at, oldest.gid
""")


@dataclass(frozen=True, slots=True)
class InDoubt:
    """How many transactions of one sink are in doubt. A count of CEILING means: at least that many."""

    count: int
    oldest: timedelta


@dataclass(frozen=True, slots=True)
class TransactionInDoubt:
    """One transaction in doubt. It belongs to a task, or to a checkpoint of a stream."""

    gid: str
    sink: str
    task_id: uuid.UUID | None
    type: str | None
    decision: Decision | None
    state: SinkState
    age: timedelta
    is_running: bool  # the attempt that began it still has its lease


def count_by_sink(connection: Connection) -> dict[str, InDoubt]:
    """Return the sinks that have transactions in doubt."""
    return {sink: InDoubt(*rest) for sink, *rest in connection.execute(COUNTS, {"ceiling": CEILING})}


def read_oldest(connection: Connection, *, most: int = 100) -> list[TransactionInDoubt]:
    """Return the oldest transactions in doubt."""
    return [
        TransactionInDoubt(gid, sink, task_id, type_, Decision(decision) if decision else None, SinkState(state), *rest)
        for gid, sink, task_id, type_, decision, state, *rest in connection.execute(IN_DOUBT, {"most": most})
    ]
