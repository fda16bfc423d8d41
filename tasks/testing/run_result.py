"""The result of a delivery in a test: the task as the ledger has it, and what its handler raised."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection

from models.sql import sql
from models.status import TaskStatus

TASK: Final = sql("""
    SELECT type, payload, status, result, attempt_count, max_attempts, next_retry_at, error_message, error_code,
           last_error, updated_at
    FROM ledger.ingest_task WHERE id = :id
""")
TRANSITIONS: Final = sql("""
    SELECT from_status, to_status, attempt_count, message FROM ledger.ingest_task_transition
    WHERE task_id = :id ORDER BY id
""")


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of status."""

    from_status: TaskStatus | None
    to_status: TaskStatus
    attempt_count: int
    message: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One task after a delivery."""

    task_id: uuid.UUID
    type: str
    payload: Any
    status: TaskStatus
    was_run: bool  # False: it was not claimed (not due, not its turn, final)
    result: Any
    attempt_count: int
    max_attempts: int
    next_retry_at: datetime | None
    retry_after: timedelta | None  # the time between settling and `next_retry_at`
    error_code: str | None
    error_message: str | None
    raised: BaseException | None  # by the handler, also a Snooze, Discard, Permanent or TryLater
    last_error: str | None = field(repr=False)  # the tail of the traceback, as `manage.py show` prints it
    transitions: tuple[Transition, ...] = field(repr=False)


def read_ran(connection: Connection, task_id: uuid.UUID, *, was_run: bool, raised: BaseException | None) -> Ran:
    """Read the task from the ledger."""
    found = connection.execute(TASK, {"id": task_id}).mappings().one()
    history = connection.execute(TRANSITIONS, {"id": task_id})
    values = {name: value for name, value in found.items() if name not in ("status", "updated_at")}
    due = found["next_retry_at"]
    return Ran(
        task_id=task_id,
        status=TaskStatus(found["status"]),
        was_run=was_run,
        retry_after=due - found["updated_at"] if due else None,
        raised=raised,
        transitions=tuple(
            Transition(before and TaskStatus(before), TaskStatus(to), *rest) for before, to, *rest in history
        ),
        **values,
    )
