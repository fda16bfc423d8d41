"""What a test learns of a task that was run: what the ledger says about it, and what its handler raised."""

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
    SELECT from_status, to_status, attempt_count, message FROM ledger.ingest_task_transition WHERE task_id = :id ORDER BY id
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
    was_run: bool  # False: the guard did not admit it (not due, not its turn, final)
    result: Any
    attempt_count: int
    max_attempts: int
    next_retry_at: datetime | None
    retry_after: timedelta | None  # from when it was settled to then
    error_code: str | None
    error_message: str | None
    raised: BaseException | None  # what came out of the handler, a verdict too
    last_error: str | None = field(repr=False)  # the tail of the traceback, as `manage.py show` prints it
    transitions: tuple[Transition, ...] = field(repr=False)


def ran(connection: Connection, task_id: uuid.UUID, *, was_run: bool, raised: BaseException | None) -> Ran:
    """As the ledger has it now."""
    found = connection.execute(TASK, {"id": task_id}).mappings().one()
    told = connection.execute(TRANSITIONS, {"id": task_id})
    values = {name: value for name, value in found.items() if name not in ("status", "updated_at")}
    due = found["next_retry_at"]
    return Ran(
        task_id=task_id,
        status=TaskStatus(found["status"]),
        was_run=was_run,
        retry_after=due - found["updated_at"] if due else None,
        raised=raised,
        transitions=tuple(
            Transition(before and TaskStatus(before), TaskStatus(to), *rest) for before, to, *rest in told
        ),
        **values,
    )
