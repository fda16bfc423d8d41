"""Requeue or discard DEAD tasks.

    DEAD ──requeue──► QUEUED     attempts start again, the history stays
    DEAD ──discard──► DISCARDED

Both work in small batches, each in its own transaction, so they are safe to interrupt, to repeat, and to run from
several places at once. Only tasks that were DEAD at the start are touched: a task that dies again meanwhile is not
requeued again and again. `dead_letter_queue.sync` brings the dead-letter queue up to date afterwards.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, Engine, TextClause
from sqlalchemy.orm import Session

import settings
from models.clock import now
from models.sql import sql
from outbox.lease import connection_of
from tasks.core import partition_keys, wakeups
from tasks.core.notifications import insert_notifications
from tasks.core.registry import handlers

BATCH: Final = 500
MAX_GROUPS: Final = 100
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

# count: by type and error, most frequent first. The last column is the total of all groups.
COUNT: Final = sql(f"""
    SELECT type, error_code, error_message, count(*), CAST(sum(count(*)) OVER () AS bigint)
    FROM (SELECT type, error_code, error_message FROM ledger.ingest_task WHERE {_CHOSEN}
          ORDER BY finished_at, id LIMIT :limit) AS longest_dead
    GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3 LIMIT :max_groups
""")

# The next page starts after the last row of `page`, not of `held`: a page whose rows are all locked by another operator
# must not end the loop.
_NEXT: Final = f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    page AS MATERIALIZED (SELECT id, finished_at FROM ledger.ingest_task WHERE {_CHOSEN} AND {PAGE}),
    held AS MATERIALIZED (
        SELECT id, attempt_count FROM ledger.ingest_task WHERE id IN (SELECT id FROM page) AND status = 'DEAD'
        ORDER BY id FOR NO KEY UPDATE SKIP LOCKED)"""
_DONE: Final = f"""
    (SELECT finished_at FROM page {LAST}), (SELECT id FROM page {LAST}), (SELECT array_agg(id) FROM held)"""

# requeue: DEAD → QUEUED, attempts start again, due at once, with a wake-up. A task that killed its worker runs alone.
# If its handler has `skip_dead`, later tasks of the partition key have overtaken it: it moves to the end of the key.
# Several tasks of one key keep their order.
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
        INSERT INTO ledger.ingest_task_transition
            (task_id, from_status, to_status, attempt_count, message, actor, created_at)
        SELECT id, 'DEAD', 'QUEUED', 0, :reason, :actor, at FROM held CROSS JOIN clock),
    back AS (
        UPDATE ledger.ingest_task task
        SET status = 'QUEUED', attempt_count = 0, next_retry_at = NULL, finished_at = NULL, last_wakeup_at = at,
            updated_at = at, isolated = error_code IS NOT DISTINCT FROM 'worker_lost',
            key_seq = coalesce((SELECT key_seq FROM turns WHERE turns.id = task.id), task.key_seq)
        FROM held, clock WHERE task.id = held.id
        RETURNING task.id, type, queue, priority, isolated, CAST(NULL AS timestamptz) AS due_at),
    {wakeups.insert_wakeups("back")}
    SELECT {_DONE}, ours FROM wakeups
""")
# discard: DEAD → DISCARDED; sends the `notify` event, and wakes the next task of the partition key.
DISCARD: Final = sql(f"""{_NEXT},
    told AS (
        INSERT INTO ledger.ingest_task_transition
            (task_id, from_status, to_status, attempt_count, message, actor, created_at)
        SELECT id, 'DEAD', 'DISCARDED', attempt_count, :reason, :actor, at FROM held CROSS JOIN clock),
    gone AS (
        UPDATE ledger.ingest_task task SET status = 'DISCARDED', finished_at = at, updated_at = at
        FROM held, clock WHERE task.id = held.id
        RETURNING task.id, type, task.attempt_count, error_message, notify, partition_key),
    {insert_notifications("gone", "DISCARDED")},
    {partition_keys.find_freed("gone")},
    {wakeups.insert_wakeups("freed")}
    SELECT {_DONE}, ours FROM wakeups
""")


@dataclass(frozen=True, slots=True)
class Choice:
    """Filters for DEAD tasks. Without a filter, all are chosen."""

    ids: list[uuid.UUID] | None = None
    type: str | None = None
    queue: str | None = None
    error_code: str | None = None
    since: datetime | None = None  # died at or after
    until: datetime | None = None  # died before

    @property
    def is_all(self) -> bool:
        return self == Choice()


@dataclass(frozen=True, slots=True)
class DeadCount:
    """The number of tasks with one type and one error."""

    type: str
    error_code: str | None
    error_message: str | None
    count: int


@dataclass(frozen=True, slots=True)
class Counted:
    """The number of chosen tasks, and the largest groups among them."""

    total: int
    groups: list[DeadCount]


def count(connection: Connection, choice: Choice, *, limit: int | None = None) -> Counted:
    """Count the chosen tasks. With a limit, count only those that `requeue` and `discard` would take first."""
    values = {**dataclasses.asdict(choice), "limit": limit, "max_groups": MAX_GROUPS}
    rows = connection.execute(COUNT, values).all()
    return Counted(int(rows[0][-1]) if rows else 0, [DeadCount(*row[:-1]) for row in rows])


def _in_batches(
    statement: TextClause,
    default_reason: str,
    engine: Engine,
    choice: Choice,
    *,
    actor: str,
    reason: str | None = None,
    reset_steps: bool = False,
    limit: int | None = None,
    batch: int = BATCH,
) -> Iterator[list[uuid.UUID]]:
    """Change the chosen tasks, longest dead first; yield the ids of each batch after its commit.

    `reset_steps` makes a requeued task forget its finished steps, so that every step runs again.
    """
    values: dict[str, Any] = {"actor": actor, "reason": reason or default_reason, "reset_steps": reset_steps}
    with engine.connect() as connection:
        values |= {**dataclasses.asdict(choice), "no_later": now(connection)}
    done, place = 0, START
    while limit is None or done < limit:
        size = batch if limit is None else min(batch, limit - done)
        with Session(engine) as db:
            given = {**values, **place, "batch": size, **wakeups.wakeup_values(db, settings.current().ingest_queues)}
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


requeue = partial(_in_batches, REQUEUE, "requeued")
discard = partial(_in_batches, DISCARD, "discarded")
