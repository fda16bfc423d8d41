"""Read everything that the ledger knows about one task: envelope, history, lease, unsent wake-ups, audits, blocker,
limit; and which workers are live.

`tasks/operations/why_waiting.py` explains from this, and from the broker's state, why the task is not running.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final, TypeVar

from pydantic.alias_generators import to_camel
from sqlalchemy import Connection, TextClause

from models.clock import now
from models.sql import sql
from models.status import EventStatus, TaskStatus
from outbox.destinations import CELERY
from tasks.core.due_times import OPEN, TIME
from tasks.core.partition_keys import BLOCKS, skipping
from tasks.core.registered_types import LiveWorker, live_workers
from tasks.core.registry import handlers
from tasks.operations.listing import ListedTask, UnknownTask, columns_of
from tracing import traceparent_of

MAX_WAKEUPS: Final = 20
MAX_AHEAD: Final = 1000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredTask(ListedTask):
    """A row of `ingest_task`."""

    partition_key: str | None
    key_seq: int | None
    last_wakeup_at: datetime | None
    expires_at: datetime | None
    lease_token: uuid.UUID | None
    isolated: bool
    last_error: str | None
    payload: Any
    context: dict[str, Any]
    result: Any
    notify: str | None

    def envelope(self) -> dict[str, Any]:
        """Return the task as JSON objects show it: flat, with `retry`. It can be submitted again unchanged."""
        shown = {to_camel(field.name): getattr(self, field.name) for field in fields(self)}
        del shown["leaseToken"]  # it is the right to write
        del shown["keySeq"]  # it means nothing outside the ledger
        key = {"idempotencyKey": self.idempotency_key} if self.idempotency_key is not None else {}
        retry = {"count": self.attempt_count, "max": self.max_attempts, "nextAttemptAt": self.next_retry_at}
        shown["traceparent"] = traceparent_of(self.task_id, self.context)
        return {**shown, "taskId": str(self.task_id), "context": {**self.context, **key}, "retry": retry}


@dataclass(frozen=True, slots=True)
class Transition:
    id: int
    from_status: TaskStatus | None
    to_status: TaskStatus
    attempt_count: int
    message: str | None
    actor: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Lease:
    """Which process may run and settle the task, and until when."""

    holder: str
    claimed_at: datetime
    lease_until: datetime
    tasks: int  # number of tasks in the batch that was claimed


@dataclass(frozen=True, slots=True)
class UnsentWakeup:
    """A wake-up for the task that is still in the outbox."""

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
    """An operator has paused the task's queue."""

    actor: str
    reason: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Blocker:
    """The first task that blocks the partition key, and how many are ahead, counted up to MAX_AHEAD."""

    task_id: uuid.UUID
    type: str
    status: TaskStatus
    ahead: int


@dataclass(frozen=True, slots=True)
class WaitedLimit:
    """The limit that the task waits for, as workers have registered it, and how much of it is used."""

    limit_key: str
    limited_at: datetime
    ahead: int  # tasks that wait before it, counted up to MAX_AHEAD
    running: int
    max_running: int | None
    rate: str | None
    limit_by: str | None


@dataclass(frozen=True, slots=True)
class Details:
    """A task and everything around it, as of `now`."""

    task: StoredTask
    transitions: list[Transition]
    lease: Lease | None
    wakeups: list[UnsentWakeup]
    audits: list[Audit]
    pause: Pause | None
    blocker: Blocker | None
    limit: WaitedLimit | None
    live_workers: list[LiveWorker]
    now: datetime
    older_transitions: int = 0  # that were not read


TASK: Final = sql(f"SELECT {columns_of(StoredTask)} FROM ledger.ingest_task WHERE id = :id")
TRANSITIONS: Final = sql(
    f"SELECT {columns_of(Transition)} FROM ledger.ingest_task_transition WHERE task_id = :id ORDER BY id"
)
LATEST_TRANSITIONS: Final = sql(f"""
    SELECT {columns_of(Transition)} FROM (
        SELECT * FROM ledger.ingest_task_transition WHERE task_id = :id ORDER BY id DESC LIMIT :most) AS latest
    ORDER BY id
""")
COUNT_TRANSITIONS: Final = sql("SELECT count(*) FROM ledger.ingest_task_transition WHERE task_id = :id")
AUDITS: Final = sql(f"SELECT {columns_of(Audit)} FROM ledger.task_audit WHERE task_id = :id ORDER BY id")
LEASE: Final = sql(
    "SELECT holder, claimed_at, lease_until, cardinality(task_ids) FROM ledger.task_lease WHERE token = :token"
)
PAUSE: Final = sql(f"SELECT {columns_of(Pause)} FROM ledger.queue_pause WHERE queue = :queue AND NOT intake")
# wakeups: unsent wake-ups that name the task. Of those for later, read only the ones for the task's own time: there may
# be a million others.
WAKEUPS: Final = sql(f"""
    SELECT {columns_of(UnsentWakeup)} FROM ledger.outbox_event
    WHERE destination = :destination AND status IN ('NEW', 'RETRYING') AND ordering_key IS NULL
      AND ({TIME} <= :now OR {TIME} = ANY(CAST(:times AS timestamptz[])))
      AND payload @> jsonb_build_object('ids', jsonb_build_array(CAST(:id AS text)))
    ORDER BY id LIMIT {MAX_WAKEUPS}
""")
# blocker: the first task that blocks the partition key, and the number of tasks ahead of this one.
BLOCKER: Final = sql(f"""
    SELECT id, type, status, count(*) OVER () FROM (
        SELECT id, type, status, key_seq FROM ledger.ingest_task
        WHERE partition_key = :key AND key_seq < :seq AND {BLOCKS} ORDER BY key_seq LIMIT {MAX_AHEAD}) AS ahead
    ORDER BY key_seq LIMIT 1
""")

# limit: what the task waits for if it waits for a limit. In SQL, `ahead` is an index scan of the tasks before it.
LIMIT: Final = sql(f"""
    SELECT task.limit_key, task.limited_at,
           (SELECT count(*) FROM (
                SELECT FROM ledger.ingest_task before
                WHERE before.type = task.type AND before.limit_key = task.limit_key AND before.limited_at IS NOT NULL
                  AND before.{OPEN} AND before.priority >= task.priority AND (before.priority > task.priority
                      OR (before.limited_at, before.id) < (task.limited_at, task.id)) LIMIT {MAX_AHEAD}) AS ahead),
           (SELECT count(*) FROM ledger.ingest_task running
            WHERE running.type = task.type AND running.limit_key = task.limit_key AND running.status = 'RUNNING'),
           max_running, rate, limit_by
    FROM ledger.ingest_task task LEFT JOIN ledger.task_type known USING (type)
    WHERE id = :id AND task.limited_at IS NOT NULL AND task.{OPEN}
""")


def read_task(connection: Connection, task_id: uuid.UUID) -> StoredTask:
    """Return the row of one task. Raises UnknownTask."""
    if found := _rows(connection, StoredTask, TASK, id=task_id):
        return found[0]
    raise UnknownTask(task_id)


def read_transitions(connection: Connection, task_id: uuid.UUID) -> list[Transition]:
    """Return the history of a task, oldest first."""
    return _rows(connection, Transition, TRANSITIONS, id=task_id)


def read_details(connection: Connection, task_id: uuid.UUID, *, most_transitions: int | None = None) -> Details:
    """Return everything about one task, or only the latest of its transitions. Raises UnknownTask."""
    task, at = read_task(connection, task_id), now(connection)
    times = [time for time in (task.next_retry_at, task.last_wakeup_at) if time is not None]
    unsent = {"destination": CELERY + task.queue, "id": str(task_id), "now": at, "times": times}
    ahead = {"key": task.partition_key, "seq": task.key_seq, "skipping": skipping(handlers())}
    is_open = task.status in (TaskStatus.QUEUED, TaskStatus.RETRYING)
    transitions, older = _read_latest(connection, task_id, most_transitions)
    return Details(
        task,
        transitions,
        next(iter(_rows(connection, Lease, LEASE, token=task.lease_token)), None),
        _rows(connection, UnsentWakeup, WAKEUPS, **unsent),
        _rows(connection, Audit, AUDITS, id=task_id),
        next(iter(_rows(connection, Pause, PAUSE, queue=task.queue)), None),
        next(iter(_rows(connection, Blocker, BLOCKER, **ahead)), None) if is_open else None,
        next(iter(_rows(connection, WaitedLimit, LIMIT, id=task_id)), None),
        live_workers(connection),
        at,
        older,
    )


def _read_latest(connection: Connection, task_id: uuid.UUID, most: int | None) -> tuple[list[Transition], int]:
    """Return the latest transitions, oldest first, and how many there are before them."""
    if most is None:
        return read_transitions(connection, task_id), 0
    found = _rows(connection, Transition, LATEST_TRANSITIONS, id=task_id, most=most)
    older = connection.execute(COUNT_TRANSITIONS, {"id": task_id}).scalar_one() - most if len(found) == most else 0
    return found, max(0, older)


def _rows(connection: Connection, shape: type[T], statement: TextClause, **values: Any) -> list[T]:
    return [shape(*row) for row in connection.execute(statement, values)]
