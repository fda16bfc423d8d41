"""A task as it is submitted: its fields in Python and in JSON, and every check before it is stored.

`NewTask` is a task in Python. `TaskEnvelope` is the same in JSON (camelCase), with the state of a task that was shown
before, so that a shown task can be submitted again. Each fault raises a `Misuse` with a code of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

import settings
from models.errors import Misuse, shorten
from models.status import STATUS_ALIASES, TaskStatus
from outbox.canonical_json import canonical_json, checked_json
from tasks.core.registry import NAME, UnknownType, handlers
from tracing import TRACEPARENT, current_traceparent, is_traceparent

KEY_LIMIT: Final = 500
# Control characters, because one of them separates type and key (`task_ids.py`), and unpaired surrogates.
NOT_IN_A_KEY: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
MOST_ATTEMPTS: Final = 1_000_000
# PostgreSQL and Python can both express these.
LATEST: Final = datetime(9000, 1, 1, tzinfo=UTC)
LONGEST: Final = timedelta(days=365_000)

FIELDS: Final = (
    "type, payload, context (idempotencyKey, traceId, user, …), retry (max, nextAttemptAt), "
    "queue, priority, runAt, partitionKey, notify, expiresAt"
)
# Fields of a shown task (`show --json`, the API) that are ignored when it is submitted again.
IGNORED: Final = frozenset({
    "attemptCount", "lastWakeupAt", "isolated", "errorCode", "errorMessage", "lastError", "result", "finishedAt",
    "why", "effects", "blocker", "transitions", "lease", "wakeups", "audits", "traceparent",
})  # fmt: skip


class BadTask(Misuse):
    """The task is invalid.

    A field is missing or has a value of the wrong type, or a key, the priority, the number of attempts, the time or the
    context is not allowed.
    """

    code = "bad_task"
    remedy = "Correct the field that the message names; docs/api.md describes the fields."


class UnknownField(Misuse):
    """The task has an unknown field.

    A field is misspelt. Unknown fields are rejected, because otherwise they would be ignored silently.
    """

    code = "unknown_field"
    remedy = "Use the fields that the message lists."


class UnknownQueue(Misuse):
    """There is no such queue.

    The task or its handler names a queue that INGEST_QUEUES does not list.
    """

    code = "unknown_queue"
    remedy = "Use a queue of INGEST_QUEUES, or add the queue there and restart the workers."


class UnknownNotify(Misuse):
    """There is no such destination.

    `notify` names a destination that OUTBOX_DESTINATIONS does not have.
    """

    code = "unknown_destination"
    remedy = "Correct the name, or add the destination to OUTBOX_DESTINATIONS."


@dataclass(frozen=True, slots=True)
class NewTask:
    """A task to be submitted."""

    type: str
    payload: Any = None
    key: str | None = None  # the idempotency key
    queue: str | None = None  # None: the handler's queue
    priority: int | None = None  # 9 is the most urgent; None: the handler's priority
    run_at: datetime | timedelta | None = None  # a time, or a duration from now
    partition_key: str | None = None  # tasks with the same partition key run one at a time, in the order of commits
    max_attempts: int | None = None  # None: the handler's max_attempts, or INGEST_MAX_ATTEMPTS
    context: Mapping[str, Any] = field(default_factory=dict)
    notify: str | None = None
    expires: datetime | timedelta | float | None = None  # a time, or a duration or seconds from now


class CheckedTask(NamedTuple):
    """A task that can be stored: values are written as JSON, and defaults are filled in.

    If this process has no handler for the type, `batch` is None, and the ledger fills in what is None: it knows the
    handlers of the workers.
    """

    new: NewTask
    payload: str
    context: str
    queue: str | None
    priority: int | None
    max_attempts: int | None
    batch: int | None
    run_at: datetime | None
    delay_seconds: float | None
    expires_at: datetime | None
    expire_seconds: float | None


def check_task(new: NewTask, *, traceparent: str | None = None) -> CheckedTask:
    """Return the task with the defaults that this process knows, or raise Misuse.

    `traceparent` is for a task that gives none, or one that is not valid; without it, the current trace is used.
    """
    handler = handlers().get(new.type)
    if handler is None and not (isinstance(new.type, str) and NAME.fullmatch(new.type)):
        raise UnknownType(f"There is no type {str(new.type)[:100]!r}: a type has letters, digits and . _ : - only.")
    current = settings.current()
    queue = new.queue or (handler.queue if handler else None)
    if queue is not None and queue not in current.ingest_queues:
        known = ", ".join(current.ingest_queues)
        raise UnknownQueue(f"There is no queue {shorten(queue)}; INGEST_QUEUES lists {known}.")
    if new.partition_key is not None:
        _check_key(new.partition_key, "A partition key")
    if new.key is not None:
        _check_key(new.key, "An idempotency key")
    if new.priority is not None and not _is_within(new.priority, 0, 9):
        raise BadTask(f"The priority is {new.priority!r}; it must be a whole number from 0 to 9.")
    priority, max_attempts = new.priority, new.max_attempts
    if handler:
        priority = handler.priority if priority is None else priority
        max_attempts = handler.max_attempts or current.ingest_max_attempts if max_attempts is None else max_attempts
    if max_attempts is not None and not _is_within(max_attempts, 1, MOST_ATTEMPTS):
        raise BadTask(f"max_attempts is {max_attempts!r}; it must be a whole number from 1 to {MOST_ATTEMPTS:,}.")
    if new.notify is not None and new.notify not in current.outbox_destinations:
        raise UnknownNotify(f"There is no destination {shorten(new.notify)}: OUTBOX_DESTINATIONS does not have it.")
    if not isinstance(new.context, Mapping):
        raise BadTask("The context must be an object with names and values.")
    context = with_trace(new.context, traceparent)
    run_at, delay_seconds = _check_time(new.run_at, "run_at", "runAt")
    expires_at, expire_seconds = _check_expiry(new.expires)
    if (run_at and expires_at and expires_at <= run_at) or (expire_seconds or inf) <= (delay_seconds or 0.0):
        raise BadTask("The task would expire before it is due.")
    return CheckedTask(
        new,
        canonical_json(new.payload),
        canonical_json(dict(context), what="context") if context else "{}",
        queue,
        priority,
        max_attempts,
        handler.batch if handler else None,
        run_at,
        delay_seconds,
        expires_at,
        expire_seconds,
    )


def with_payload(checked: CheckedTask, payload: str, key: str | None) -> CheckedTask:
    """Return the task with another payload, given as JSON, and another key; its other fields are checked already."""
    if key is None:
        return CheckedTask(checked.new, checked_json(payload), *checked[2:])
    _check_key(key, "An idempotency key")
    return CheckedTask(replace(checked.new, key=key), checked_json(payload), *checked[2:])


def with_trace(context: Mapping[str, Any], traceparent: str | None = None) -> Mapping[str, Any]:
    """Return the context with a valid traceparent, or with none if there is no trace to join (`tracing.py`)."""
    is_given = TRACEPARENT in context
    if is_given and is_traceparent(context[TRACEPARENT]):
        # `traceparent` is a span in the current trace, so it is the closer parent.
        if traceparent is None or context[TRACEPARENT] != current_traceparent():
            return context
    else:
        traceparent = traceparent or current_traceparent()
    if traceparent is None and not is_given:
        return context
    others = {name: value for name, value in context.items() if name != TRACEPARENT}
    return others | ({TRACEPARENT: traceparent} if traceparent else {})


def _check_key(key: str, what: str) -> None:
    if not isinstance(key, str) or not 0 < len(key) <= KEY_LIMIT or NOT_IN_A_KEY.search(key):
        raise BadTask(f"{what} must be text of 1 to {KEY_LIMIT} characters without control characters.")


def _is_within(number: int, least: int, most: int) -> bool:
    return type(number) is int and least <= number <= most  # True and False are not accepted as numbers


def _check_time(
    given: datetime | timedelta | None, name: str, name_in_json: str
) -> tuple[datetime | None, float | None]:
    """Return a time, or the seconds from now. A day is 24 hours, also when the clocks change."""
    match given:
        case None:
            return None, None
        case timedelta() if abs(given) <= LONGEST:
            return None, given.total_seconds()
        case datetime() if given.utcoffset() is None:
            raise BadTask(f"`{name_in_json}` needs a time zone, as in 2030-01-01T08:00:00+00:00.")
        case datetime() if given <= LATEST:
            return given, None
        case datetime() | timedelta():
            raise BadTask(f"`{name_in_json}` is more than a thousand years away.")
    raise BadTask(f"{name} must be a datetime, or a timedelta from now.")


def _check_expiry(expires: datetime | timedelta | float | None) -> tuple[datetime | None, float | None]:
    """Return a time, or the seconds from now, which may also be given as a number."""
    given = expires
    if isinstance(given, int | float) and not isinstance(given, bool):
        try:
            given = timedelta(seconds=given)
        except (OverflowError, ValueError):  # infinite, or not a number
            raise BadTask("expires must be less than a thousand years away.") from None
    at, seconds = _check_time(given, "expires", "expiresAt")  # type: ignore[arg-type]
    if seconds is not None and seconds <= 0:
        raise BadTask("expires must be in the future.")
    return at, seconds


class _Json(BaseModel):
    """Unknown fields are rejected: a misspelt field would otherwise have no effect."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_alias=True, validate_by_name=True, extra="forbid", frozen=True
    )


class Context(_Json):
    """Where a task comes from. Further fields are stored as they are."""

    model_config = ConfigDict(validate_by_name=False, extra="allow")

    idempotency_key: str | None = None
    trace_id: str | None = None
    user: Any = None


class RetryState(_Json):
    """How often the task failed, how often it may, and when the next attempt is due."""

    count: int = Field(0, ge=0)
    max: int | None = Field(None, ge=1)
    next_attempt_at: datetime | None = None

    @field_validator("next_attempt_at", mode="before")
    @classmethod
    def _read_zero_as_none(cls, given: Any) -> Any:
        return given or None


class TaskEnvelope(_Json):
    """The body of `POST /api/tasks`, and a line of `submit --lines --envelopes`."""

    type: str
    payload: Any = None
    context: Context = Context()
    retry: RetryState = RetryState()
    queue: str | None = None
    priority: int | None = None
    run_at: datetime | None = None  # wins over retry.nextAttemptAt
    partition_key: str | None = None
    notify: str | None = None
    expires_at: datetime | None = None
    # Fields of a shown task. The ledger sets the first four itself; the others repeat what context and retry say.
    task_id: str | None = None
    status: TaskStatus = TaskStatus.QUEUED
    created_at: datetime | None = None
    updated_at: datetime | None = None
    idempotency_key: str | None = None
    max_attempts: int | None = None
    next_retry_at: datetime | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, given: Any) -> Any:
        return {k: v for k, v in given.items() if k not in IGNORED} if isinstance(given, Mapping) else given

    @field_validator("status", mode="before")
    @classmethod
    def _translate_status(cls, given: Any) -> Any:
        return STATUS_ALIASES.get(given, given) if isinstance(given, str) else given

    def new_task(self) -> NewTask:
        """Return the task to submit, without the state that the ledger sets itself."""
        key, retry = self.context.idempotency_key, self.retry
        for name, shown, place, read in (
            ("idempotencyKey", self.idempotency_key, "context.idempotencyKey", key),
            ("maxAttempts", self.max_attempts, "retry.max", retry.max),
            ("nextRetryAt", self.next_retry_at, "retry.nextAttemptAt", retry.next_attempt_at),
        ):
            if shown is not None and shown != read:
                raise BadTask(f"`{name}` and `{place}` differ; send only `{place}`.")
        named = {"traceId": self.context.trace_id, "user": self.context.user}
        return NewTask(
            self.type,
            self.payload,
            key=key,
            queue=self.queue,
            priority=self.priority,
            run_at=self.run_at or retry.next_attempt_at,
            partition_key=self.partition_key,
            max_attempts=retry.max,
            context={k: v for k, v in named.items() if v is not None} | (self.context.model_extra or {}),
            notify=self.notify,
            expires=self.expires_at,
        )
