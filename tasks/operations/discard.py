"""Discard one task, whatever its state, or cancel it, if it has not begun.

    discard    QUEUED | RETRYING | DEAD ──► DISCARDED
               RUNNING                  ──► DISCARDED, without its lease token: later writes of its worker are refused
    cancel     QUEUED | RETRYING        ──► DISCARDED; a task that has ended is refused, and so is one that runs, unless
                                            the caller says `even_running`

A running handler is interrupted within seconds: it gets `LeaseLost`. A batch handler is not interrupted. In both cases
settling fails, writes inside the transaction are rolled back, and the rest of the batch runs again. The next task of
its partition key is woken, and the tasks that wait for its limit.
"""

from __future__ import annotations

import uuid
from typing import Final

from sqlalchemy import Engine, TextClause
from sqlalchemy.orm import Session

from models.errors import CeleriacError
from models.sql import sql
from models.status import TaskStatus
from tasks.core.discarding import DISCARD_HELD
from tasks.core.due_times import OPEN
from tasks.core.partition_keys import UNDONE
from tasks.core.registered_types import registered_limits
from tasks.execution.limits import wake_waiting
from tasks.operations.dead_tasks import execute
from tasks.operations.listing import FINAL, status_of


def _discarding(condition: str) -> TextClause:
    """discard: the task, if its status meets the condition → DISCARDED."""
    return sql(f"""
        WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
        held AS MATERIALIZED (
            SELECT id, status FROM ledger.ingest_task WHERE id = :id AND {condition} FOR NO KEY UPDATE),
        {DISCARD_HELD}
        SELECT (SELECT status FROM held) AS was, ours FROM wakeups
    """)


DISCARD: Final = _discarding(UNDONE)
CANCEL: Final = _discarding(OPEN)
CANCEL_EVEN_RUNNING: Final = _discarding(f"({OPEN} OR status = 'RUNNING')")


class AlreadyDone(CeleriacError):
    """The task has already ended.

    A task that is SUCCEEDED or DISCARDED can be neither discarded nor cancelled, and a DEAD one cannot be cancelled.
    """

    code = "already_done"
    remedy = "Nothing: the task does not run again by itself. A DEAD task can be discarded or requeued."
    http_status = 409


class TaskRunning(CeleriacError):
    """The task is running, so it cannot be cancelled any more.

    A worker has claimed the task; its handler may already have had effects.
    """

    code = "task_running"
    remedy = "Wait for its end. An operator can stop it with `manage.py discard ID`."
    http_status = 409


def discard(engine: Engine, task_id: uuid.UUID, *, actor: str, reason: str | None = None) -> TaskStatus:
    """Discard the task and return its status before. Raises UnknownTask and AlreadyDone."""
    return _discard(engine, DISCARD, task_id, actor=actor, reason=reason)


def cancel(
    engine: Engine, task_id: uuid.UUID, *, actor: str, reason: str | None = None, even_running: bool = False
) -> TaskStatus:
    """Discard a task that waits, and return its status before. Raises UnknownTask, AlreadyDone and TaskRunning.

    `even_running` also discards a task that runs, instead of raising TaskRunning.
    """
    statement = CANCEL_EVEN_RUNNING if even_running else CANCEL
    return _discard(engine, statement, task_id, actor=actor, reason=reason or "cancelled")


def _discard(
    engine: Engine, statement: TextClause, task_id: uuid.UUID, *, actor: str, reason: str | None
) -> TaskStatus:
    with Session(engine) as db:
        was = execute(db, statement, {"id": task_id, "actor": actor, "reason": reason or None})["was"]
        if was is None:
            status = status_of(db, task_id)
            if status in FINAL:
                raise AlreadyDone(f"{task_id} is {status} already.")
            raise TaskRunning(f"{task_id} is running, so it cannot be cancelled any more.")
        wake_waiting(db, [task_id], limits=registered_limits(db.connection()))
        db.commit()
    return TaskStatus(was)
