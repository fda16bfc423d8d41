"""One task with everything that the ledger knows of it: its envelope, history, lease, wake-ups, audits, a
pause, who is before it.

`tasks/operations/why_waiting.py` says from this, and from the broker, why it is not running.
"""

# ruff: noqa: S608 - every piece is a literal of this file; values are parameters

from __future__ import annotations

import uuid
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final, TypeVar

from pydantic.alias_generators import to_camel
from sqlalchemy import Connection

from models.clock import now
from models.sql import sql
from models.status import EventStatus, TaskStatus
from tasks.core import wakeups
from tasks.core.due import TIME
from tasks.core.partition_keys import UNDONE
from tasks.core.registry import handlers
from tasks.operations.listing import UnknownTask

MOST_WAKEUPS: Final = 20
MOST_AHEAD: Final = 1000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShownTask:
    """A row of `ingest_task`."""

    task_id: uuid.UUID
    type: str
    status: TaskStatus
    queue: str
    priority: int
    idempotency_key: str | None
    partition_key: str | None
    key_seq: int | None
    attempt_count: int
    max_attempts: int
    next_retry_at: datetime | None
    last_wakeup_at: datetime | None
    lease_token: uuid.UUID | None
    isolated: bool
    error_code: str | None
    error_message: str | None
    last_error: str | None
    payload: Any
    context: dict[str, Any]
    result: Any
    notify: str | None
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None

    def envelope(self) -> dict[str, Any]:
        """The task in the JSON of the seeds: flat, with `retry` besides; it can be submitted again as it stands."""
        shown = {to_camel(field.name): getattr(self, field.name) for field in fields(self)}
        del shown["leaseToken"]  # a right to write is nobody's to see
        del shown["keySeq"]  # says nothing outside the ledger
        key = {"idempotencyKey": self.idempotency_key} if self.idempotency_key is not None else {}
        retry = {"count": self.attempt_count, "max": self.max_attempts, "nextAttemptAt": self.next_retry_at}
        return {**shown, "taskId": str(self.task_id), "context": {**self.context, **key}, "retry": retry}


@dataclass(frozen=True, slots=True)
class Transition:
    from_status: TaskStatus | None
    to_status: TaskStatus
    attempt_count: int
    message: str | None
    actor: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Lease:
    """Who may run and settle it, and for how long unless it is renewed."""

    holder: str
    claimed_at: datetime
    lease_until: datetime
    tasks: int  # of the batch that it was claimed with


@dataclass(frozen=True, slots=True)
class UnsentWakeup:
    """A wake-up for it that is still in the outbox."""

    id: int
    status: EventStatus
    attempt_count: int
    created_at: datetime
    next_retry_at: datetime | None
    locked_by: str | None
    lease_until: datetime | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class Audit:
    code: str
    worker_id: str
    detail: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Pause:
    """Its queue was stopped by an operator."""

    actor: str
    reason: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Blocker:
    """What stands before it in its partition key: the nearest, and how many there are in all, up to a ceiling."""

    task_id: uuid.UUID
    type: str
    status: TaskStatus
    ahead: int


@dataclass(frozen=True, slots=True)
class Details:
    """All of it, as it was at `now`."""

    task: ShownTask
    transitions: list[Transition]
    lease: Lease | None
    wakeups: list[UnsentWakeup]
    audits: list[Audit]
    pause: Pause | None
    blocker: Blocker | None
    now: datetime


def _columns(shape: type[Any]) -> str:
    return ", ".join(field.name for field in fields(shape))


TASK: Final = sql(f"SELECT {_columns(ShownTask).replace('task_id', 'id', 1)} FROM ledger.ingest_task WHERE id = :id")
TRANSITIONS: Final = sql(
    f"SELECT {_columns(Transition)} FROM ledger.ingest_task_transition WHERE task_id = :id ORDER BY id"
)
AUDITS: Final = sql(f"SELECT {_columns(Audit)} FROM ledger.task_audit WHERE task_id = :id ORDER BY id")
LEASE: Final = sql("""
    SELECT holder, claimed_at, lease_until, cardinality(task_ids) FROM ledger.task_lease WHERE token = :token
""")
PAUSE: Final = sql(f"SELECT {_columns(Pause)} FROM ledger.queue_pause WHERE queue = :queue")
# wake-ups: unsent ones that name it. Of those for later only the ones for its own time are looked through: there may be a
# million others.
WAKEUPS: Final = sql(f"""
    SELECT {_columns(UnsentWakeup)} FROM ledger.outbox_event
    WHERE destination = :destination AND status IN ('NEW', 'RETRYING') AND ordering_key IS NULL
      AND ({TIME} <= :now OR {TIME} = ANY(CAST(:times AS timestamptz[])))
      AND payload @> jsonb_build_object('ids', jsonb_build_array(CAST(:id AS text)))
    ORDER BY id LIMIT {MOST_WAKEUPS}
""")


# blocker: the first of its key that is not done, and how many are before this one.
BLOCKER: Final = sql(f"""
    SELECT id, type, status, count(*) OVER () FROM (
        SELECT id, type, status, key_seq FROM ledger.ingest_task
        WHERE partition_key = :key AND key_seq < :seq AND {UNDONE} AND NOT (status = 'DEAD' AND type = ANY(:skipping))
        ORDER BY key_seq LIMIT {MOST_AHEAD}) AS ahead
    ORDER BY key_seq LIMIT 1
""")


def shown(connection: Connection, task_id: uuid.UUID) -> ShownTask:
    """The task alone. Raises UnknownTask."""
    found = connection.execute(TASK, {"id": task_id}).one_or_none()
    if found is None:
        raise UnknownTask(task_id)
    return ShownTask(*found)


def transitions(connection: Connection, task_id: uuid.UUID) -> list[Transition]:
    """Its history, from its beginning."""
    return [Transition(*row) for row in connection.execute(TRANSITIONS, {"id": task_id})]


def details(connection: Connection, task_id: uuid.UUID) -> Details:
    """Raises UnknownTask."""
    task = shown(connection, task_id)
    at = now(connection)
    times = [time for time in (task.next_retry_at, task.last_wakeup_at) if time is not None]
    unsent = {"destination": wakeups.WAKEUP + task.queue, "id": str(task_id), "now": at, "times": times}
    lease = connection.execute(LEASE, {"token": task.lease_token}).one_or_none() if task.lease_token else None
    pause = connection.execute(PAUSE, {"queue": task.queue}).one_or_none()
    return Details(
        task,
        transitions(connection, task_id),
        Lease(*lease) if lease else None,
        [UnsentWakeup(*row) for row in connection.execute(WAKEUPS, unsent)],
        [Audit(*row) for row in connection.execute(AUDITS, {"id": task_id})],
        Pause(*pause) if pause else None,
        _blocker(connection, task),
        at,
    )


def _blocker(connection: Connection, task: ShownTask) -> Blocker | None:
    if task.partition_key is None or task.status not in (TaskStatus.QUEUED, TaskStatus.RETRYING):
        return None
    skipping = [type for type, handler in handlers().items() if handler.skip_dead]
    values = {"key": task.partition_key, "seq": task.key_seq, "skipping": skipping}
    found = connection.execute(BLOCKER, values).one_or_none()
    return Blocker(*found) if found else None
