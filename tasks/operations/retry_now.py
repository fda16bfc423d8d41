"""retry-now: one task that waits for its time, or is dead, runs as soon as a worker is free.

    RETRYING, or QUEUED for later ──► due now, with a wake-up; no attempt is charged, the audit says who (`retry_now`)
    DEAD                          ──► QUEUED, attempts start again (tasks/operations/dead_tasks.py)

Its old wake-up comes too, at its own time, and finds nothing to do: a wake-up is a hint (P7).
"""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Engine
from sqlalchemy.orm import Session

import settings
from models.errors import CeleriacError
from models.sql import sql
from models.status import TaskStatus
from outbox.lease import connection_of
from tasks.core import wakeups
from tasks.operations import dead_tasks
from tasks.operations.listing import status_of

# retry_now: RETRYING, or QUEUED with a time → due now. What was due already is woken once more.
RETRY_NOW: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    held AS MATERIALIZED (
        SELECT id, next_retry_at FROM ledger.ingest_task
        WHERE id = :id AND status IN ('QUEUED', 'RETRYING') AND next_retry_at IS NOT NULL FOR NO KEY UPDATE),
    audited AS (
        INSERT INTO ledger.task_audit (task_id, code, worker_id, detail, created_at)
        SELECT id, 'retry_now', :actor, concat_ws('; ', CAST(:reason AS text),
               format('was due at %s UTC', next_retry_at AT TIME ZONE 'UTC')), at
        FROM held CROSS JOIN clock),
    hurried AS (
        UPDATE ledger.ingest_task task SET next_retry_at = least(task.next_retry_at, at), last_wakeup_at = at, updated_at = at
        FROM held, clock WHERE task.id = held.id
        RETURNING task.id, type, queue, priority, isolated, CAST(NULL AS timestamptz) AS due_at),
    {wakeups.wake("hurried")}
    SELECT (SELECT count(*) FROM hurried), ours FROM wakeups
""")


class NothingToHurry(CeleriacError):
    """The task does not wait for its time."""

    code = "nothing_to_hurry"
    http_status = 409


@dataclass(frozen=True, slots=True)
class Hurried:
    """What it was before; it is due now."""

    task_id: uuid.UUID
    was: TaskStatus


def retry_now(engine: Engine, task_id: uuid.UUID, *, actor: str, reason: str | None = None) -> Hurried:
    """Raises UnknownTask, and NothingToHurry for a task that runs, is done, or is due already and has never waited."""
    with Session(engine) as db:
        was = status_of(db, task_id)
        values = {"id": task_id, "actor": actor, "reason": reason}
        values |= wakeups.wakeup_values(db, settings.current().ingest_queues)
        hurried, ours = connection_of(db).execute(RETRY_NOW, values).one()
        wakeups.publish_after_commit(db, ours)
        db.commit()
    if hurried:
        return Hurried(task_id, was)
    choice = dead_tasks.Choice(ids=[task_id])
    if any(dead_tasks.requeue(engine, choice, actor=actor, reason=reason or "retry-now")):
        return Hurried(task_id, TaskStatus.DEAD)
    raise NothingToHurry(_SENTENCES[was].format(id=task_id))


_SENTENCES: Final = {
    TaskStatus.QUEUED: "{id} is due already: `manage.py show {id}` says what it waits for.",
    TaskStatus.RUNNING: "{id} is running.",
    TaskStatus.RETRYING: "{id} has just been taken by somebody else.",
    TaskStatus.DEAD: "{id} has just been taken by somebody else.",
    TaskStatus.SUCCEEDED: "{id} has SUCCEEDED: it is not run twice.",
    TaskStatus.DISCARDED: "{id} is DISCARDED.",
}
