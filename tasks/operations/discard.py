"""Discard one task, whatever its state.

    QUEUED | RETRYING | DEAD ──► DISCARDED
    RUNNING                  ──► DISCARDED, without its lease token: every later write of its worker is refused

A handler that runs inside a transaction is not interrupted: settling fails, and its writes are rolled back. A handler
outside a transaction is interrupted within seconds. The next task of its partition key is woken.
"""

from __future__ import annotations

import uuid
from typing import Final

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from models.errors import CeleriacError
from models.sql import sql
from models.status import TaskStatus
from tasks.core.partition_keys import UNDONE
from tasks.operations.dead_tasks import DISCARD_HELD, execute
from tasks.operations.listing import status_of

# discard: any status but SUCCEEDED and DISCARDED → DISCARDED.
DISCARD: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    held AS MATERIALIZED (
        SELECT id, status FROM ledger.ingest_task WHERE id = :id AND {UNDONE} FOR NO KEY UPDATE),
    {DISCARD_HELD}
    SELECT (SELECT status FROM held) AS was, ours FROM wakeups
""")


class AlreadyDone(CeleriacError):
    """The task has already ended.

    A task that is SUCCEEDED or DISCARDED cannot be discarded.
    """

    code = "already_done"
    remedy = "Nothing: the task will not run again."
    http_status = 409


def discard(engine: Engine, task_id: uuid.UUID, *, actor: str, reason: str | None = None) -> TaskStatus:
    """Discard the task and return its status before. Raises UnknownTask and AlreadyDone."""
    with Session(engine) as db:
        was = execute(db, DISCARD, {"id": task_id, "actor": actor, "reason": reason or None})["was"]
        if was is None:
            raise AlreadyDone(f"{task_id} is {status_of(db, task_id)} already.")
        db.commit()
    return TaskStatus(was)
