"""Register workers in the ledger as a starting worker does, with handlers that this process does not keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

import settings
from models.engine import engine
from tasks.core.holders import HOST
from tasks.core.registered_types import Registration, live_workers
from tasks.core.registry import Handler
from tasks.operations import task_details


def registered(
    handlers: Mapping[str, Handler],
    *,
    name: str = "another:1-worker",
    consumed: Any = ("ingest",),
    topic: str | None = None,
    **variables: Any,
) -> Registration:
    """Register a worker with these handlers. `variables` are its settings, where they differ from ours."""
    current = settings.current().model_copy(update=variables)
    made = Registration(engine(), current, handlers, consumed=consumed, topic=topic)
    made.worker = made._values["worker"] = name
    made.tick()
    return made


def handler_of(type: str, **how: Any) -> dict[str, Handler]:
    """Return a handler that is not registered in this process."""
    function: Callable[..., None] = lambda _task, _db: None  # noqa: E731
    return {type: Handler(type, function, **how)}


@contextmanager
def no_worker_processes() -> Iterator[None]:
    """Hide the workers that other tests share: they register in the ledger of every test, with another broker."""
    with pytest.MonkeyPatch.context() as patch:
        own = lambda connection: [each for each in live_workers(connection) if not each.worker.startswith(HOST)]  # noqa: E731
        patch.setattr(task_details, "live_workers", own)
        yield
