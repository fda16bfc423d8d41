"""The task as it is submitted and shown: what may be in it, and in which words.

`NewTask` is what Python hands to `submit`; `TaskEnvelope` is the same and the task's state in the JSON of the seeds
(camelCase). Everything that can be wrong is found here, before anything is stored, and each has its own error code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

import settings
from models.errors import Misuse
from models.status import TaskStatus
from outbox.canonical import canonical_json
from tasks.registry import find

KEY_LIMIT: Final = 500
LOWEST_PRIORITY: Final = 0
HIGHEST_PRIORITY: Final = 9


class BadTask(Misuse):
    """The task cannot be submitted as it was given."""

    code = "bad_task"


class UnknownQueue(Misuse):
    """There is no such queue."""

    code = "unknown_queue"


class UnknownNotify(Misuse):
    """There is no such destination to notify."""

    code = "unknown_destination"


@dataclass(frozen=True, slots=True)
class NewTask:
    """A task to be submitted."""

    type: str
    payload: Any = None
    key: str | None = None
    queue: str | None = None  # None: its handler's
    priority: int = 5  # 9 is the most urgent
    run_at: datetime | timedelta | None = None  # a time, or how long from now
    partition_key: str | None = None
    max_attempts: int | None = None  # None: its handler's, or INGEST_MAX_ATTEMPTS
    context: Mapping[str, Any] = field(default_factory=dict)
    notify: str | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """A task that can be stored."""

    new: NewTask
    payload: str
    context: str
    queue: str
    max_attempts: int
    due_at: datetime | None
    delay: timedelta | None


def checked(new: NewTask) -> Checked:
    handler = find(new.type)
    current = settings.current()
    queue = new.queue or handler.queue
    if queue not in current.ingest_queues:
        known = ", ".join(current.ingest_queues)
        raise UnknownQueue(f"There is no queue {queue!r} for tasks. Known: {known}. INGEST_QUEUES names them.")
    if new.partition_key is not None:
        raise BadTask("Partition keys are not there yet.")
    if not LOWEST_PRIORITY <= new.priority <= HIGHEST_PRIORITY:
        raise BadTask(f"The priority is {new.priority}, and it must be between 0 and 9.")
    if new.key is not None and not (0 < len(new.key) <= KEY_LIMIT and new.key.isprintable()):
        raise BadTask(f"A key is printable text of 1 to {KEY_LIMIT} characters.")
    max_attempts = new.max_attempts if new.max_attempts is not None else handler.max_attempts
    if max_attempts is not None and max_attempts < 1:
        raise BadTask(f"max_attempts is {max_attempts}, and at least one is needed.")
    if new.notify is not None and new.notify not in current.outbox_destinations:
        raise UnknownNotify(f"There is no destination {new.notify!r} to notify: name it in OUTBOX_DESTINATIONS.")
    if isinstance(new.run_at, datetime) and new.run_at.tzinfo is None:
        raise BadTask("run_at has no time zone, so nobody knows when it is.")
    return Checked(
        new,
        canonical_json(new.payload),
        canonical_json(dict(new.context), what="context"),
        queue,
        max_attempts or current.ingest_max_attempts,
        new.run_at if isinstance(new.run_at, datetime) else None,
        new.run_at if isinstance(new.run_at, timedelta) else None,
    )


class _Json(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)


class Context(_Json):
    """Where a task comes from; further keys are kept."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="allow")

    idempotency_key: str | None = None
    trace_id: str | None = None
    user: Any = None


class RetryState(_Json):
    """How often it failed, how often it may, and when it is tried next."""

    count: int = Field(0, ge=0)
    max: int | None = Field(None, ge=1)
    next_attempt_at: datetime | None = None


class TaskEnvelope(_Json):
    """The seed's envelope."""

    task_id: str | None = None
    type: str
    payload: Any = None
    context: Context = Context()
    retry: RetryState = RetryState()
    status: TaskStatus = TaskStatus.QUEUED
    created_at: datetime | None = None
    updated_at: datetime | None = None

    def new_task(self) -> NewTask:
        """To be submitted: what the ledger says itself (id, status, times, count) is not taken over."""
        kept = self.context.model_dump(by_alias=True, exclude_none=True, exclude={"idempotency_key"})
        return NewTask(
            self.type,
            self.payload,
            key=self.context.idempotency_key,
            run_at=self.retry.next_attempt_at,
            max_attempts=self.retry.max,
            context=kept,
        )
