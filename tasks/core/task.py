"""A task as its handler sees it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ParamSpec, TypeVar

from models.errors import Misuse
from tasks.core.steps import RESUME_EVERY, Steps

Item = TypeVar("Item")
Given = ParamSpec("Given")


class NoSteps(Misuse):
    """Steps belong to handlers with transactional=False: what a transactional one writes commits with SUCCEEDED."""

    code = "no_steps"


@dataclass(slots=True, eq=False)
class Task:
    """One claimed task. Two of them are never equal, so that one can be looked up as quickly as it was made."""

    id: uuid.UUID
    type: str
    payload: Any
    context: Mapping[str, Any]
    queue: str
    priority: int
    attempt_count: int  # failures so far
    max_attempts: int
    key: str | None  # the idempotency key
    due_at: datetime | None  # None: it was due from the start, and this is its first run
    created_at: datetime
    partition_key: str | None = None
    key_seq: int | None = None  # its place among the tasks of its partition key
    steps: Steps | None = field(default=None, repr=False)  # of a handler outside a transaction

    def step(self, name: str, function: Callable[Given, Any], *arguments: Given.args, **options: Given.kwargs) -> Any:
        """Call the function once in the life of this task: its result is kept, and returned again after a retry."""
        return self._steps().run(name, function, *arguments, **options)

    def resume(self, name: str, items: Iterable[Item], *, every: int = RESUME_EVERY) -> Iterator[Item]:
        """Go through items, and after a retry through those that are left. The last few may come once more."""
        return self._steps().resume(name, items, every=every)

    def check_lease(self) -> None:
        """For long loops without steps: raises LeaseLost when nothing more may be done in the name of this task."""
        self._steps().check_lease()

    def _steps(self) -> Steps:
        if self.steps is None:
            raise NoSteps
        return self.steps
