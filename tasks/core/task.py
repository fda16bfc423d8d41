"""A task as its handler sees it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ParamSpec, Protocol, TypeVar

import tracing
from models.errors import Misuse
from tasks.core.async_steps import AsyncSteps
from tasks.core.steps import RESUME_EVERY, Steps

Item = TypeVar("Item")
Given = ParamSpec("Given")


class NoSteps(Misuse):
    """Steps need a handler with transactional=False.

    A transactional handler called `task.step`; its writes commit together with SUCCEEDED anyway.
    """

    code = "no_steps"
    remedy = "Declare the handler with `transactional=False`, or write to the database without a step."


class NoSinks(Misuse):
    """Sinks need a handler with transactional=False.

    A transactional handler called `task.sink`. Its transaction could roll back after the sink has committed.
    """

    code = "no_sinks"
    remedy = "Declare the handler with `transactional=False`; or write to the ledger's own database through `db`."


class SinksOfTask(Protocol):
    """The sinks of a running task (`sinks/task_sinks.py`)."""

    def open(self, name: str) -> Any: ...


@dataclass(slots=True, eq=False)
class Task:
    """A claimed task. Tasks are compared by identity, which makes them fast keys of a dict."""

    id: uuid.UUID
    type: str
    payload: Any
    context: Mapping[str, Any]
    queue: str
    priority: int
    attempt_count: int  # failures so far
    max_attempts: int
    key: str | None  # the idempotency key
    due_at: datetime | None  # None: it was due when it was submitted, and this is its first run
    created_at: datetime
    partition_key: str | None = None
    key_seq: int | None = None  # its place in the order of its partition key
    isolated: bool = False  # it must run alone, because a process was lost with it
    waited_seconds: float | None = None  # since it was due, until it was claimed
    steps: Steps | AsyncSteps | None = field(default=None, repr=False)  # None in a transactional handler
    sinks: SinksOfTask | None = field(default=None, repr=False)  # None in a transactional handler

    @property
    def traceparent(self) -> str:
        """The W3C traceparent of the task: the one it was submitted with, or one that is made from its id."""
        return tracing.traceparent_of(self.id, self.context)

    @property
    def trace_id(self) -> str:
        """The trace id in `traceparent`."""
        return tracing.trace_id_of(self.id, self.context)

    def step(self, name: str, function: Callable[Given, Any], *arguments: Given.args, **options: Given.kwargs) -> Any:
        """Call the function, store its result, and return the stored result after a retry.

        In an async handler: `await task.step(…)`. The function may be async; a plain one is called in a thread.
        """
        return self._steps().run(name, function, *arguments, **options)

    def resume(self, name: str, items: Iterable[Item], *, every: int = RESUME_EVERY) -> Any:
        """Yield the items; after a retry, those that are left. The last few may be repeated (at most `every`).

        In an async handler: `async for item in task.resume(…)`.
        """
        return self._steps().resume(name, items, every=every)

    def sink(self, name: str) -> Any:
        """Return the sink that SINKS calls by this name. Its effect happens once for this task, as it guarantees."""
        if self.sinks is None:
            raise NoSinks
        return self.sinks.open(name)

    def check_lease(self) -> None:
        """Raise LeaseLost if this worker may no longer run the task. Meant for long loops without steps."""
        self._steps().check_lease()

    def _steps(self) -> Steps | AsyncSteps:
        if self.steps is None:
            raise NoSteps
        return self.steps
