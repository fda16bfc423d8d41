"""discard: one task that is not wanted any more, whatever it is doing.

    QUEUED | RETRYING | DEAD ──► DISCARDED
    RUNNING                  ──► DISCARDED, and its token is gone: whatever its worker still wants to write is refused

The handler of a running task is not asked. One inside a transaction finds out when it settles, and what it wrote is
rolled back; one outside is interrupted within seconds, and its `finally` runs. Whoever waited
for it in its partition key is woken.
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
from tasks.core import partition_keys, wakeups
from tasks.core.notifications import notified
from tasks.core.registry import handlers
from tasks.operations.listing import status_of

# discard: anything that is not final, and DEAD → DISCARDED; whoever asked to be notified is told.
DISCARD: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    held AS MATERIALIZED (
        SELECT id, status FROM ledger.ingest_task
        WHERE id = :id AND {partition_keys.UNDONE} FOR NO KEY UPDATE),
    gone AS (
        UPDATE ledger.ingest_task task
        SET status = 'DISCARDED', lease_token = NULL, finished_at = at, updated_at = at
        FROM held, clock WHERE task.id = held.id
        RETURNING task.id, type, attempt_count, error_message, notify, partition_key),
    told AS (
        INSERT INTO ledger.ingest_task_transition (task_id, from_status, to_status, attempt_count, message, actor, created_at)
        SELECT id, held.status, 'DISCARDED', attempt_count, :reason, :actor, at
        FROM gone JOIN held USING (id) CROSS JOIN clock),
    {notified("gone", "DISCARDED")},
    {partition_keys.freed("gone")},
    {wakeups.wake("freed")}
    SELECT (SELECT status FROM held), ours FROM wakeups
""")


class NothingToDiscard(CeleriacError):
    """The task is final already."""

    code = "nothing_to_discard"
    http_status = 409


@dataclass(frozen=True, slots=True)
class DiscardedTask:
    """What it was before."""

    task_id: uuid.UUID
    was: TaskStatus


def discard(engine: Engine, task_id: uuid.UUID, *, actor: str, reason: str | None = None) -> DiscardedTask:
    """Raises UnknownTask and NothingToDiscard."""
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
            raise NothingToDiscard(f"{task_id} is {status_of(db, task_id)} already.")
        db.commit()
    return DiscardedTask(task_id, TaskStatus(was))
