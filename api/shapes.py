"""The JSON objects of answers, as types for the OpenAPI document. No answer is built from these.

Most are made of the dataclass that a route shows, so that a new field is documented by itself.
`tests/api/test_schema.py` compares real answers with them.
"""

from __future__ import annotations

import dataclasses
import uuid
from datetime import datetime
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model
from pydantic.alias_generators import to_camel

from documents import Hit, ListedDocument
from models.receipts import Level
from models.status import TaskStatus
from sinks.contract import Effect
from tasks.core.registered_types import RegisteredType
from tasks.operations.dead_tasks import DeadCount
from tasks.operations.listing import ListedTask
from tasks.operations.pauses import QueuePause
from tasks.operations.queue_list import ListedQueue
from tasks.operations.scale import WorkerSize
from tasks.operations.stats import ErrorCount, KindCount, StatusCount
from tasks.operations.task_details import StoredTask, Transition
from tasks.operations.why_waiting import Reason
from tasks.submission.submit import Submitted


class Shape(BaseModel):
    """An object with camelCase names."""

    model_config = ConfigDict(alias_generator=to_camel)


def shape_of(kind: Any, *, name: str | None = None, without: tuple[str, ...] = (), **more: Any) -> type[Shape]:
    """Return the shape of a dataclass as `camel` shows it. `more` are further fields and their types."""
    hints = get_type_hints(kind)
    fields = {each.name: hints[each.name] for each in dataclasses.fields(kind) if each.name not in without} | more
    required: Any = {field: (type_, ...) for field, type_ in fields.items()}
    return create_model(name or kind.__name__, __base__=Shape, __doc__=kind.__doc__, **required)


def list_of(name: str, field: str, shape: Any, **more: Any) -> type[Shape]:
    """Return the shape of an object that holds a list."""
    fields: Any = {field: (list[shape], ...), **{key: (type_, ...) for key, type_ in more.items()}}
    return create_model(name, __base__=Shape, **fields)


class Fault(BaseModel):
    """What is wrong: a code for programs and a sentence for people."""

    model_config = ConfigDict(extra="allow")

    code: str
    message: str


class ErrorBody(BaseModel):
    """Every error has this shape. docs/messages.md explains the codes."""

    error: Fault


class RetryShown(Shape):
    """How often the task failed, how often it may, and when the next attempt is due."""

    count: int
    max: int
    next_attempt_at: datetime | None


class UnsavedTask(Shape):
    """A task that is accepted, or was rejected, and is not in the ledger."""

    task_id: uuid.UUID | None
    level: Literal[Level.ACCEPTED, Level.REJECTED]
    status: TaskStatus | None
    accepted_at: datetime
    promised_by: datetime
    error_code: str | None = None
    error_message: str | None = None
    finished_at: datetime | None = None


class SignedReceipt(Shape):
    """A signed receipt. Fields that do not belong to its level are left out; docs/receipts.md describes them."""

    level: Level
    id: uuid.UUID
    task_id: uuid.UUID | None
    client_id: str | None
    sha256: str
    duplicate: bool
    ordered: bool
    policy: str
    accepted_at: datetime
    promised_by: datetime
    saved_at: datetime | None = None
    rejected_at: datetime | None = None
    ledger_seq: int | None = None
    code: str | None = None
    reason: str | None = None
    key_id: str
    signature: str


class PublishedKey(Shape):
    """A public key that verifies receipts."""

    key_id: str
    algorithm: str
    public_key: str
    active_from: datetime
    retired_at: datetime | None


class KeyList(Shape):
    """The public keys of all receipts."""

    keys: list[PublishedKey]


class Status(Shape):
    """The answer of a probe."""

    status: str


SubmittedTask: Any = shape_of(Submitted, name="SubmittedTask")
Task: Any = shape_of(StoredTask, name="Task", without=("lease_token", "key_seq"), retry=RetryShown)
ShownTransition: Any = shape_of(Transition)
ShownEffect: Any = shape_of(Effect)
ShownReason: Any = shape_of(Reason)
ShownListedTask: Any = shape_of(ListedTask)
ShownDeadCount: Any = shape_of(DeadCount)
ShownStatusCount: Any = shape_of(StatusCount)
ShownKindCount: Any = shape_of(KindCount, without=("oldest_due",), oldest_due=float | None)
ShownErrorCount: Any = shape_of(ErrorCount)
ShownPause: Any = shape_of(QueuePause)
ShownHandler: Any = shape_of(RegisteredType, name="Handler")
ShownWorker: Any = shape_of(WorkerSize)
ShownQueue: Any = shape_of(ListedQueue, name="Queue", without=("oldest_due",), oldest_due=float | None)
ShownDocument: Any = shape_of(ListedDocument, name="Document")
ShownHit: Any = shape_of(Hit)
