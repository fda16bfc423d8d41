"""Dead letters: what an operator does with DEAD tasks, and the queue that shows them (P23).

    DEAD ──requeue──► QUEUED      attempts start again, the history stays        DEAD ──discard──► DISCARDED

In small batches, each its own transaction: safe to interrupt and to run twice, also by two people at once. Only what
was DEAD when it began is touched, so that tasks that die again meanwhile are not brought back for ever.

The queue `INGEST_DLQ_QUEUE` is a projection of the DEAD tasks: each puts a message with its id and error code there,
through the outbox. `sync` makes it equal again after a requeue, a discard, or a broker that lost it.
"""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Engine, TextClause
from sqlalchemy.orm import Session

import settings
from models.clock import now
from models.sql import sql
from outbox.lease import connection_of
from tasks.core import partition_keys, wakeups
from tasks.core.notifications import notified
from tasks.core.registry import handlers

BATCH: Final = 500
MOST_GROUPS: Final = 100
Place = dict[str, Any]
START: Final[Place] = {"after_at": "-infinity", "after_id": uuid.UUID(int=0)}

_CHOSEN: Final = """status = 'DEAD'
    AND (CAST(:ids AS uuid[]) IS NULL OR id = ANY(CAST(:ids AS uuid[])))
    AND (CAST(:type AS text) IS NULL OR type = :type)
    AND (CAST(:queue AS text) IS NULL OR queue = :queue)
    AND (CAST(:error_code AS text) IS NULL OR error_code = :error_code)
    AND (CAST(:since AS timestamptz) IS NULL OR finished_at >= :since)
    AND (CAST(:until AS timestamptz) IS NULL OR finished_at < :until)"""
PAGE: Final = """finished_at <= :no_later AND (finished_at, id) > (:after_at, :after_id)
        ORDER BY finished_at, id LIMIT :batch"""
LAST: Final = "ORDER BY finished_at DESC, id DESC LIMIT 1"

# count: by type and error, the most frequent first; the last column is how many there are in all. With a limit, those
# that a requeue would take: the longest dead.
_COUNT: Final = """
    SELECT type, error_code, error_message, count(*), CAST(sum(count(*)) OVER () AS bigint)
    FROM {} GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3 LIMIT :most
"""
COUNT: Final = sql(_COUNT.format(f"ingest_task WHERE {_CHOSEN}"))
COUNT_FIRST: Final = sql(
    _COUNT.format(f"(SELECT * FROM ledger.ingest_task WHERE {_CHOSEN} ORDER BY finished_at, id LIMIT :limit) AS first")
)

# The place in the order is that of the page, not of what could be locked: whoever works on the same page at the same
# time must not end our way through the others.
_NEXT: Final = f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    page AS MATERIALIZED (SELECT id, finished_at FROM ledger.ingest_task WHERE {_CHOSEN} AND {PAGE}),
    held AS MATERIALIZED (
        SELECT id, attempt_count FROM ledger.ingest_task WHERE id IN (SELECT id FROM page) AND status = 'DEAD'
        ORDER BY id FOR NO KEY UPDATE SKIP LOCKED)"""
_DONE: Final = f"""
    (SELECT finished_at FROM page {LAST}), (SELECT id FROM page {LAST}), (SELECT array_agg(id) FROM held)"""

# requeue: DEAD → QUEUED, attempts start again, due at once, with its wake-up. What killed its worker runs alone (P5).
# Where the others of its partition key went on without it, it has lost its turn, and gets another at the end (P9);
# several of one key keep their order.
REQUEUE: Final = sql(f"""{_NEXT},
    forgotten AS (DELETE FROM ledger.task_step WHERE :reset_steps AND task_id IN (SELECT id FROM held)),
    locked AS MATERIALIZED (
        SELECT ledger.ingest_key_lock(partition_key) FROM (
            SELECT DISTINCT partition_key FROM ledger.ingest_task
            WHERE id IN (SELECT id FROM held) AND partition_key IS NOT NULL AND type = ANY(CAST(:skipping AS text[]))
            ORDER BY 1) AS keys),
    turns AS MATERIALIZED (
        SELECT id, nextval('ledger.ingest_task_key_seq') AS key_seq FROM (
            SELECT id FROM ledger.ingest_task
            WHERE id IN (SELECT id FROM held) AND partition_key IS NOT NULL AND type = ANY(CAST(:skipping AS text[]))
              AND (SELECT count(*) FROM locked) > 0
            ORDER BY key_seq) AS skipped),
    told AS (
        INSERT INTO ledger.ingest_task_transition (task_id, from_status, to_status, attempt_count, message, actor, created_at)
        SELECT id, 'DEAD', 'QUEUED', 0, :reason, :actor, at FROM held CROSS JOIN clock),
    back AS (
        UPDATE ledger.ingest_task task
        SET status = 'QUEUED', attempt_count = 0, next_retry_at = NULL, finished_at = NULL, last_wakeup_at = at,
            updated_at = at, isolated = error_code IS NOT DISTINCT FROM 'worker_lost',
            key_seq = coalesce((SELECT key_seq FROM turns WHERE turns.id = task.id), task.key_seq)
        FROM held, clock WHERE task.id = held.id
        RETURNING task.id, type, queue, priority, isolated, CAST(NULL AS timestamptz) AS due_at),
    {wakeups.wake("back")}
    SELECT {_DONE}, ours FROM wakeups
""")
# discard: DEAD → DISCARDED; whoever asked to be notified is told, and who waited for it in its partition key is woken.
DISCARD: Final = sql(f"""{_NEXT},
    told AS (
        INSERT INTO ledger.ingest_task_transition (task_id, from_status, to_status, attempt_count, message, actor, created_at)
        SELECT id, 'DEAD', 'DISCARDED', attempt_count, :reason, :actor, at FROM held CROSS JOIN clock),
    gone AS (
        UPDATE ledger.ingest_task task SET status = 'DISCARDED', finished_at = at, updated_at = at
        FROM held, clock WHERE task.id = held.id
        RETURNING task.id, type, task.attempt_count, error_message, notify, partition_key),
    {notified("gone", "DISCARDED")},
    {partition_keys.freed("gone")},
    {wakeups.wake("freed")}
    SELECT {_DONE}, ours FROM wakeups
""")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which DEAD tasks. Nothing given: all."""

    ids: list[uuid.UUID] | None = None
    type: str | None = None
    queue: str | None = None
    error_code: str | None = None
    since: datetime | None = None  # DEAD since
    until: datetime | None = None

    @property
    def is_all(self) -> bool:
        return self == Choice()


@dataclass(frozen=True, slots=True)
class DeadCount:
    """How many of one kind."""

    type: str
    error_code: str | None
    error_message: str | None
    count: int


@dataclass(frozen=True, slots=True)
class Counted:
    """How many are chosen, and of which kinds: the most frequent ones."""

    total: int
    groups: list[DeadCount]


def count(connection: Connection, choice: Choice, *, limit: int | None = None) -> Counted:
    """With a limit, of those that `requeue` and `discard` take first."""
    values = {**dataclasses.asdict(choice), "most": MOST_GROUPS, "limit": limit}
    rows = connection.execute(COUNT if limit is None else COUNT_FIRST, values).all()
    return Counted(int(rows[0][-1]) if rows else 0, [DeadCount(*row[:-1]) for row in rows])


def requeue(
    engine: Engine,
    choice: Choice,
    *,
    actor: str,
    reason: str | None = None,
    reset_steps: bool = False,
    limit: int | None = None,
    batch: int = BATCH,
) -> Iterator[list[uuid.UUID]]:
    """Yields the ids of each batch that was requeued, after its commit. Steps that are done stay so, unless reset."""
    values = {"actor": actor, "reason": reason or "requeued", "reset_steps": reset_steps}
    return _in_batches(engine, choice, REQUEUE, limit=limit, batch=batch, values=values)


def discard(
    engine: Engine,
    choice: Choice,
    *,
    actor: str,
    reason: str | None = None,
    limit: int | None = None,
    batch: int = BATCH,
) -> Iterator[list[uuid.UUID]]:
    """Yields the ids of each batch that was discarded, after its commit."""
    values = {"actor": actor, "reason": reason or "discarded"}
    return _in_batches(engine, choice, DISCARD, limit=limit, batch=batch, values=values)


def _in_batches(
    engine: Engine, choice: Choice, statement: TextClause, *, limit: int | None, batch: int, values: dict[str, Any]
) -> Iterator[list[uuid.UUID]]:
    with engine.connect() as connection:
        values = {**dataclasses.asdict(choice), **values, "no_later": now(connection)}
    done, place = 0, START
    while limit is None or done < limit:
        most = batch if limit is None else min(batch, limit - done)
        with Session(engine) as db:
            given = {**values, **place, "batch": most, **wakeups.wakeup_values(db, settings.current().ingest_queues)}
            given["skipping"] = partition_keys.skipping(handlers())
            at, last, ids, ours = connection_of(db).execute(statement, given).one()
            wakeups.publish_after_commit(db, ours)
            db.commit()
        if at is None:
            return
        place = {"after_at": at, "after_id": last}
        if ids:
            done += len(ids)
            yield ids
