"""Requeue or discard DEAD tasks.

    DEAD ──requeue──► QUEUED     attempts start again, the history stays
    DEAD ──discard──► DISCARDED

`dead_letter_queue.sync` brings the dead-letter queue up to date afterwards.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from sqlalchemy import Connection, RowMapping, TextClause
from sqlalchemy.orm import Session

import settings
from models.clock import now
from models.sql import sql
from outbox import dead_rows
from outbox.dead_rows import DeadRows, Filters, Values
from tasks.core import partition_keys, wakeups
from tasks.core.discarding import DISCARD_HELD
from tasks.core.registry import handlers

_CHOSEN: Final = """status = 'DEAD'
    AND (CAST(:ids AS uuid[]) IS NULL OR id = ANY(CAST(:ids AS uuid[])))
    AND (CAST(:type AS text) IS NULL OR type = :type)
    AND (CAST(:queue AS text) IS NULL OR queue = :queue)
    AND (CAST(:error_code AS text) IS NULL OR error_code = :error_code)
    AND (CAST(:since AS timestamptz) IS NULL OR finished_at >= :since)
    AND (CAST(:until AS timestamptz) IS NULL OR finished_at < :until)
    AND NOT EXISTS (
        SELECT FROM unnest(CAST(:limited_types AS text[]), CAST(:limited_seconds AS float8[])) AS age(of_type, seconds)
        WHERE of_type = type AND created_at < (SELECT ledger.ledger_now()) - make_interval(secs => seconds))"""
ORDER: Final = "finished_at, id"
PAGE: Final = f"finished_at <= :no_later AND ({ORDER}) > (:after_at, :after_id) ORDER BY {ORDER} LIMIT :batch"
LAST: Final = "ORDER BY finished_at DESC, id DESC LIMIT 1"

CHOSEN_TASKS: Final = sql(
    f"SELECT id, type, status FROM ledger.ingest_task WHERE {_CHOSEN} ORDER BY {ORDER} LIMIT :limit"
)

# LIMIT counts the rows that could be locked: a page that another operator has locked does not end the loop.
_HELD: Final = f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    held AS MATERIALIZED (
        SELECT id, status, finished_at, type, partition_key, key_seq FROM ledger.ingest_task
        WHERE {_CHOSEN} AND {PAGE} FOR NO KEY UPDATE SKIP LOCKED)"""
_CHANGED: Final = f"""
    SELECT (SELECT array_agg(id) FROM held) AS changed, (SELECT finished_at FROM held {LAST}) AS after_at,
           (SELECT id FROM held {LAST}) AS after_id, ours FROM wakeups"""

# The tasks in `held` → QUEUED, attempts start again, due at once, with a wake-up. A task that killed its worker runs
# alone. If its handler has `skip_dead`, later tasks of the partition key have overtaken it: it moves to the end of the
# key. Several tasks of one key keep their order.
REQUEUE_HELD: Final = f"""
    forgotten AS (DELETE FROM ledger.task_step WHERE :reset_steps AND task_id IN (SELECT id FROM held)),
    overtaken AS MATERIALIZED (
        SELECT id, partition_key, key_seq FROM held
        WHERE partition_key IS NOT NULL AND type = ANY(CAST(:skipping AS text[]))),
    locked AS MATERIALIZED (
        SELECT ledger.ingest_key_lock(partition_key)
        FROM (SELECT DISTINCT partition_key FROM overtaken ORDER BY 1) AS keys),
    turns AS MATERIALIZED (
        SELECT id, nextval('ledger.ingest_task_key_seq') AS key_seq
        FROM (SELECT id FROM overtaken WHERE (SELECT count(*) FROM locked) > 0 ORDER BY key_seq) AS in_order),
    told AS (
        INSERT INTO ledger.ingest_task_transition
            (task_id, from_status, to_status, attempt_count, message, actor, created_at)
        SELECT id, 'DEAD', 'QUEUED', 0, coalesce(:reason, 'requeued'), :actor, at FROM held CROSS JOIN clock),
    back AS (
        UPDATE ledger.ingest_task task
        SET status = 'QUEUED', attempt_count = 0, next_retry_at = NULL, finished_at = NULL, last_wakeup_at = at,
            updated_at = at, isolated = error_code IS NOT DISTINCT FROM 'worker_lost',
            key_seq = coalesce((SELECT key_seq FROM turns WHERE turns.id = task.id), task.key_seq)
        FROM held, clock WHERE task.id = held.id
        RETURNING task.id, task.type, queue, priority, isolated, CAST(NULL AS timestamptz) AS due_at),
    {wakeups.insert_wakeups("back")}"""

# requeue: DEAD → QUEUED.
REQUEUE: Final = sql(f"{_HELD}, {REQUEUE_HELD} {_CHANGED}")

# discard: DEAD → DISCARDED.
DISCARD: Final = sql(f"{_HELD}, {DISCARD_HELD} {_CHANGED}")


@dataclass(frozen=True, slots=True)
class Choice(Filters):
    """Filters for DEAD tasks."""

    ids: list[uuid.UUID] | None = None
    type: str | None = None
    queue: str | None = None
    error_code: str | None = None
    since: datetime | None = None  # died at or after
    until: datetime | None = None  # died before
    limited_types: list[str] = field(default_factory=list)  # of which older tasks are left out …
    limited_seconds: list[float] = field(default_factory=list)  # … than this

    @property
    def is_all(self) -> bool:
        return replace(self, limited_types=[], limited_seconds=[]) == Choice()

    def younger_than(self, ages: Mapping[str, timedelta]) -> Choice:
        """Return the same choice without tasks of these types that were created longer ago."""
        seconds = [age.total_seconds() for age in ages.values()]
        return replace(self, limited_types=list(ages), limited_seconds=seconds)


@dataclass(frozen=True, slots=True)
class DeadCount:
    """The number of tasks with one type and one error."""

    type: str
    error_code: str | None
    error_message: str | None
    count: int


def chosen_tasks(connection: Connection, choice: Choice, *, limit: int) -> list[tuple[uuid.UUID, str, str]]:
    """Return id, type and status of the chosen tasks, longest dead first."""
    return [tuple(row) for row in connection.execute(CHOSEN_TASKS, {**asdict(choice), "limit": limit})]


def start(connection: Connection) -> Values:
    """Return the values with which the first page begins. Tasks that die later are on no page."""
    return {"after_at": "-infinity", "after_id": uuid.UUID(int=0), "no_later": now(connection)}


def execute(db: Session, statement: TextClause, values: Values) -> RowMapping:
    """Execute a statement that wakes tasks; their wake-ups are published after the commit."""
    values = {**values, **wakeups.wakeup_values(db, settings.current().ingest_queues)}
    row = dead_rows.execute(db, statement, {**values, "skipping": partition_keys.skipping(handlers())})
    wakeups.publish_after_commit(db, row["ours"])
    return row


TASKS: Final[DeadRows[uuid.UUID, DeadCount]] = DeadRows(
    table="ingest_task",
    chosen=_CHOSEN,
    order=ORDER,
    columns="type, error_code, error_message",
    group=DeadCount,
    start=start,
    execute=execute,
)
count = TASKS.count
# `reset_steps` makes a requeued task forget its finished steps, so that every step runs again.
requeue = partial(TASKS.in_batches, REQUEUE, reset_steps=False)
discard = partial(TASKS.in_batches, DISCARD)
