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

import settings
from models.errors import CeleriacError
from models.sql import sql
from models.status import TaskStatus
from outbox.lease import connection_of
from tasks.core import partition_keys, wakeups
from tasks.core.notifications import insert_notifications
from tasks.core.registry import handlers
from tasks.operations.listing import ChangedTask, status_of

# discard: any status but SUCCEEDED and DISCARDED → DISCARDED; sends the `notify` event, wakes the next of its key.
DISCARD: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    held AS MATERIALIZED (
        SELECT id, status FROM ledger.ingest_task WHERE id = :id AND {partition_keys.UNDONE} FOR NO KEY UPDATE),
    gone AS (
        UPDATE ledger.ingest_task task
        SET status = 'DISCARDED', lease_token = NULL, finished_at = at, updated_at = at
        FROM held, clock WHERE task.id = held.id
        RETURNING task.id, type, attempt_count, error_message, notify, partition_key),
    told AS (
        INSERT INTO ledger.ingest_task_transition
            (task_id, from_status, to_status, attempt_count, message, actor, created_at)
        SELECT id, held.status, 'DISCARDED', attempt_count, :reason, :actor, at
        FROM gone JOIN held USING (id) CROSS JOIN clock),
    {insert_notifications("gone", "DISCARDED")},
    {partition_keys.find_freed("gone")},
    {wakeups.insert_wakeups("freed")}
    SELECT (SELECT status FROM held), ours FROM wakeups
""")


class AlreadyDone(CeleriacError):
    """The task has already ended.

    A task that is SUCCEEDED or DISCARDED cannot be discarded.
    """

    code = "already_done"
    remedy = "Nothing: the task will not run again."
    http_status = 409


def discard(engine: Engine, task_id: uuid.UUID, *, actor: str, reason: str | None = None) -> ChangedTask:
    """Discard the task. Raises UnknownTask and AlreadyDone."""
    with Session(engine) as db:
        values = {
            "id": task_id,
            "actor": actor,
            "reason": reason or "discarded",
            "skipping": partition_keys.skipping(handlers()),
        }
        values |= wakeups.wakeup_values(db, settings.current().ingest_queues)
        was, ours = connection_of(db).execute(DISCARD, values).one()
        wakeups.publish_after_commit(db, ours)
        if was is None:
            raise AlreadyDone(f"{task_id} is {status_of(db, task_id)} already.")
        db.commit()
    return ChangedTask(task_id, TaskStatus(was))
