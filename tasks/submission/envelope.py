"""The task as it is submitted and shown: what may be in it, and in which words.

`NewTask` is what Python hands to `submit`; `TaskEnvelope` is the same and the task's state in the JSON of the seeds
(camelCase). Everything that can be wrong is found here, before anything is stored, and each has its own error code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

import settings
from models.errors import Misuse
from models.status import TaskStatus
from outbox.canonical import canonical_json
from tasks.core.registry import find

KEY_LIMIT: Final = 500
# Control characters: one of them separates type and key in `identity.py`. Half a surrogate pair is no text.
NOT_IN_A_KEY: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
LOWEST_PRIORITY: Final = 0
HIGHEST_PRIORITY: Final = 9
MOST_ATTEMPTS: Final = 1_000_000
# Sane, and within what PostgreSQL and Python both can say.
LATEST: Final = datetime(9000, 1, 1, tzinfo=UTC)
LONGEST: Final = timedelta(days=365_000)

# The seed's words for a status are understood; ours are said.
SEED_STATUSES: Final = {
    "pending": TaskStatus.QUEUED,
    "processing": TaskStatus.RUNNING,
    "retry": TaskStatus.RETRYING,
    "completed": TaskStatus.SUCCEEDED,
    "suspended": TaskStatus.DEAD,
}

# What may be said of a task, for whoever said something else.
FIELDS: Final = (
    "type, payload, context (idempotencyKey, traceId, user, …), retry (max, nextAttemptAt), "
    "queue, priority, runAt, partitionKey, notify"
)
# What a task has besides where it is shown (`show --json`, the API): it may come back.
SHOWN: Final = frozenset({
    "queue", "priority", "partitionKey", "notify", "idempotencyKey", "maxAttempts", "nextRetryAt", "attemptCount",
    "lastWakeupAt", "isolated", "errorCode", "errorMessage", "lastError", "result", "finishedAt",
    "why", "blocker", "transitions", "lease", "wakeups", "audits",
})  # fmt: skip


class BadTask(Misuse):
    """The task cannot be submitted as it was given."""

    code = "bad_task"


class UnknownField(Misuse):
    """There is no such field in an envelope."""

    code = "unknown_field"


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
    partition_key: str | None = None  # tasks of one key run one after the other, in the order of their commits
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
    batch: int
    run_at: datetime | None
    delay_seconds: float | None


def checked(new: NewTask) -> Checked:
    """Raises what is wrong with it."""
    handler = find(new.type)
    current = settings.current()
    queue = new.queue or handler.queue
    if queue not in current.ingest_queues:
        known = ", ".join(current.ingest_queues)
        raise UnknownQueue(f"There is no queue {queue!r} for tasks. Known: {known}. INGEST_QUEUES names them.")
    if new.partition_key is not None:
        _check_key(new.partition_key, "A partition key")
    if not _is_within(new.priority, LOWEST_PRIORITY, HIGHEST_PRIORITY):
        raise BadTask(f"The priority is {new.priority!r}, and it must be between 0 and 9.")
    if new.key is not None:
        _check_key(new.key)
    max_attempts = new.max_attempts if new.max_attempts is not None else handler.max_attempts
    if max_attempts is not None and not _is_within(max_attempts, 1, MOST_ATTEMPTS):
        raise BadTask(f"max_attempts is {max_attempts!r}, and it must be between 1 and {MOST_ATTEMPTS:,}.")
    if new.notify is not None and new.notify not in current.outbox_destinations:
        raise UnknownNotify(f"There is no destination {new.notify!r} to notify: name it in OUTBOX_DESTINATIONS.")
    if not isinstance(new.context, Mapping):
        raise BadTask("The context is an object: names and values.")
    run_at, delay_seconds = _when(new.run_at)
    return Checked(
        new,
        canonical_json(new.payload),
        canonical_json(dict(new.context), what="context") if new.context else "{}",
        queue,
        max_attempts or current.ingest_max_attempts,
        handler.batch,
        run_at,
        delay_seconds,
    )


def _check_key(key: str, what: str = "A key") -> None:
    if not isinstance(key, str) or not 0 < len(key) <= KEY_LIMIT or NOT_IN_A_KEY.search(key):
        raise BadTask(f"{what} is text of 1 to {KEY_LIMIT} characters without control characters.")


def _is_within(number: int, least: int, most: int) -> bool:
    return type(number) is int and least <= number <= most  # True is no number here


def _when(run_at: datetime | timedelta | None) -> tuple[datetime | None, float | None]:
    """A time, or seconds from now. A day is 24 hours, also on the day on which clocks are changed."""
    match run_at:
        case None:
            return None, None
        case timedelta():
            if abs(run_at) > LONGEST:
                raise BadTask("run_at is more than a thousand years away.")
            return None, run_at.total_seconds()
        case datetime():
            if run_at.utcoffset() is None:
                raise BadTask("run_at has no time zone, so nobody knows when it is.")
            if run_at > LATEST:
                raise BadTask("run_at is more than a thousand years away.")
            return run_at, None
    raise BadTask("run_at is a datetime, or a timedelta from now.")


class _Json(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_alias=True, validate_by_name=True, serialize_by_alias=True, frozen=True
    )


class Context(_Json):
    """Where a task comes from; further keys are kept as they are."""

    model_config = ConfigDict(validate_by_name=False, extra="allow")

    idempotency_key: str | None = None
    trace_id: str | None = None
    user: Any = None


class _Closed(_Json):
    """What nothing reads is refused: whoever misspells a field would wait for an effect that never comes."""

    place: ClassVar[str] = ""
    besides: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _has_no_unknown_field(cls, given: Any) -> Any:
        known = cls.besides | cls.model_fields.keys() | {field.alias for field in cls.model_fields.values()}
        for name in given if isinstance(given, Mapping) else ():
            if name not in known:
                named = cls.place + str(name)[:100]
                raise UnknownField(f"There is no field {named!r} in an envelope. Known: {FIELDS}.")
        return given


class RetryState(_Closed):
    """How often it failed, how often it may, and when it is tried next."""

    place = "retry."

    count: int = Field(0, ge=0)
    max: int | None = Field(None, ge=1)
    next_attempt_at: datetime | None = None

    @field_validator("next_attempt_at", mode="before")
    @classmethod
    def _zero_is_no_time(cls, given: Any) -> Any:
        return given or None


class TaskEnvelope(_Closed):
    """The seed's envelope."""

    besides = SHOWN

    task_id: str | None = None
    type: str
    payload: Any = None
    context: Context = Context()
    retry: RetryState = RetryState()
    status: TaskStatus = TaskStatus.QUEUED
    created_at: datetime | None = None
    updated_at: datetime | None = None

    @field_validator("status", mode="before")
    @classmethod
    def _in_our_words(cls, given: Any) -> Any:
        return SEED_STATUSES.get(given, given) if isinstance(given, str) else given

    def new_task(self) -> NewTask:
        """To be submitted: what the ledger says itself (id, status, times, count) is not taken over."""
        said = {"traceId": self.context.trace_id, "user": self.context.user}
        kept = {name: value for name, value in said.items() if value is not None}
        return NewTask(
            self.type,
            self.payload,
            key=self.context.idempotency_key,
            run_at=self.retry.next_attempt_at,
            max_attempts=self.retry.max,
            context={**kept, **(self.context.model_extra or {})},
        )


class Submission(TaskEnvelope):
    """The body of `POST /api/tasks`, and a line of `submit --lines --envelopes`."""

    queue: str | None = None
    priority: int = 5
    run_at: datetime | None = None  # before retry.nextAttemptAt
    partition_key: str | None = None
    notify: str | None = None
    idempotency_key: str | None = None  # shown, and so are these; context and retry are what is read
    max_attempts: int | None = None
    next_retry_at: datetime | None = None

    def new_task(self) -> NewTask:
        new = super().new_task()
        _check_same("idempotencyKey", self.idempotency_key, "context.idempotencyKey", new.key)
        _check_same("maxAttempts", self.max_attempts, "retry.max", new.max_attempts)
        _check_same("nextRetryAt", self.next_retry_at, "retry.nextAttemptAt", new.run_at)
        return replace(
            new,
            queue=self.queue,
            priority=self.priority,
            run_at=self.run_at or new.run_at,
            partition_key=self.partition_key,
            notify=self.notify,
        )


def _check_same(name: str, shown: object, place: str, read: object) -> None:
    if shown is not None and shown != read:
        raise BadTask(f"{name} does not say the same as {place}, which is read: give {place} alone.")
