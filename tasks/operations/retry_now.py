"""Make one task due now that waits for its time, or requeue it if it is DEAD.

    RETRYING, or QUEUED for later ──► due now, with a wake-up and an audit; this does not count as an attempt
    DEAD                          ──► QUEUED, attempts start again (`tasks/operations/dead_tasks.py`)

The wake-up for the old time still arrives and finds nothing to do.
"""

from __future__ import annotations

import uuid
from typing import Final

from sqlalchemy import Engine
from sqlalchemy.orm import Session

import settings
from models.errors import CeleriacError
from models.sql import sql
from models.status import TaskStatus
from tasks.core.wakeups import wake_again
from tasks.operations import dead_tasks
from tasks.operations.listing import status_of
from tasks.operations.sink_effects import KeysForgotten, key_lives

# The tasks in `held` → due now, with an audit. The statement has the current time in its CTE `clock`.
MAKE_DUE_HELD: Final = """
    audited AS (
        INSERT INTO ledger.task_audit (task_id, code, worker_id, detail, created_at)
        SELECT id, 'retry_now', :actor, concat_ws('; ', CAST(:reason AS text),
               format('was due at %s UTC', next_retry_at AT TIME ZONE 'UTC')), at
        FROM held CROSS JOIN clock),
    made_due AS (
        UPDATE ledger.ingest_task task SET next_retry_at = least(task.next_retry_at, at), updated_at = at
        FROM held, clock WHERE task.id = held.id)"""
# retry_now: RETRYING, or QUEUED with a due time → due now.
RETRY_NOW: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    held AS MATERIALIZED (
        SELECT id, next_retry_at FROM ledger.ingest_task
        WHERE id = :id AND status IN ('QUEUED', 'RETRYING') AND next_retry_at IS NOT NULL FOR NO KEY UPDATE),
    {MAKE_DUE_HELD}
    SELECT id FROM held
""")


class NotWaiting(CeleriacError):
    """The task does not wait for its time.

    `retry-now` was called for a task that is running, has ended, or is due already.
    """

    code = "not_waiting"
    remedy = "See what the task is doing with `manage.py show ID`."
    http_status = 409


class NotDead(CeleriacError):
    """Only a DEAD task can be requeued.

    `tasks.requeue` was called for a task that waits, runs, or is SUCCEEDED or DISCARDED.
    """

    code = "not_dead"
    remedy = "Nothing, if the task waits or runs. Otherwise submit a new task."
    http_status = 409


def retry_now(engine: Engine, task_id: uuid.UUID, *, actor: str, reason: str | None = None) -> TaskStatus:
    """Make the task due now and return its status before.

    Raises UnknownTask, and NotWaiting if the task is neither DEAD nor waiting for a due time.
    """
    with Session(engine) as db:
        was = status_of(db, task_id)
        ids = db.execute(RETRY_NOW, {"id": task_id, "actor": actor, "reason": reason}).scalars().all()
        wake_again(db, ids, queues=settings.current().ingest_queues)
        db.commit()
    if ids:
        return was
    if _requeue_if_dead(engine, task_id, actor=actor, reason=reason or "retry-now"):
        return TaskStatus.DEAD
    raise NotWaiting(_MESSAGES[was].format(id=task_id))


def requeue(
    engine: Engine,
    task_id: uuid.UUID,
    *,
    actor: str,
    reason: str | None = None,
    accept_duplicates: bool = False,
    reset_steps: bool = False,
) -> None:
    """Requeue a DEAD task. Raises UnknownTask, NotDead, and KeysForgotten unless duplicates are accepted.

    `reset_steps` makes the task forget its finished steps, so that every step runs again.
    """
    choice = dead_tasks.Choice(ids=[task_id])
    if not accept_duplicates:
        choice = _require_keys(engine, choice)
    if not any(dead_tasks.requeue(engine, choice, actor=actor, reason=reason, reset_steps=reset_steps)):
        with Session(engine) as db:
            raise NotDead(f"{task_id} is {status_of(db, task_id)}, not DEAD.")


def _requeue_if_dead(engine: Engine, task_id: uuid.UUID, *, actor: str, reason: str | None) -> bool:
    choice = _require_keys(engine, dead_tasks.Choice(ids=[task_id]))
    return any(dead_tasks.requeue(engine, choice, actor=actor, reason=reason))


def _require_keys(engine: Engine, everything: dead_tasks.Choice) -> dead_tasks.Choice:
    """Return the choice without tasks whose sinks have forgotten their keys; raise KeysForgotten if there are any."""
    with engine.connect() as connection:
        choice = everything.younger_than(key_lives(connection))
        if dead_tasks.count(connection, choice).total < dead_tasks.count(connection, everything).total:
            raise KeysForgotten
    return choice


_CHANGED_MEANWHILE: Final = "{id} was changed by another process at the same time. Try again."
_MESSAGES: Final = {
    TaskStatus.QUEUED: "{id} is due already. `manage.py show {id}` shows what it waits for.",
    TaskStatus.RUNNING: "{id} is running.",
    TaskStatus.RETRYING: _CHANGED_MEANWHILE,
    TaskStatus.DEAD: _CHANGED_MEANWHILE,
    TaskStatus.SUCCEEDED: "{id} is SUCCEEDED and does not run again.",
    TaskStatus.DISCARDED: "{id} is DISCARDED and does not run again.",
}
