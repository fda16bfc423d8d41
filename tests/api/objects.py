"""The objects that paths and examples name: how to make one of each kind for a test."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Final

import pytest

import settings
from models.engine import engine
from tasks.operations.discard import discard
from tests.api.callers import FLAKY, Caller
from workflows import functions


def task_of(owner: Caller) -> str:
    return str(owner.submit({"n": 1}).json()["taskId"])


def document_of(owner: Caller) -> str:
    upload = owner.post("/api/knowledge/documents/upload-async", files={"file": ("README.md", "Roses are red.")})
    return str(upload.json()["taskId"])


def receipt_of(owner: Caller) -> str:
    return str(owner.post("/api/tasks?receipt=saved", json={"type": FLAKY}).json()["id"])


def ended_task_of(owner: Caller) -> str:
    id_ = task_of(owner)
    discard(engine(), uuid.UUID(id_), actor="test")
    return id_


# How to make the object that a path names, by the name of its parameter.
Make = Callable[[Caller], str]
OBJECTS: Final[dict[str, Make]] = {
    "task_id": task_of,
    "receipt_id": receipt_of,
    "queue": lambda _: "ingest",
}
# Where a route needs another object than others with the same name.
OBJECTS_OF_ROUTES: Final[dict[str, Make]] = {
    "/api/knowledge/tasks/{task_id}": document_of,
    "/api/tasks/{task_id}/events": ended_task_of,  # the stream of a task that waits does not end
}


def names_in(path: str) -> list[str]:
    return [part[1:-1] for part in path.split("/") if part.startswith("{")]


def make(name: str, path: str) -> Make:
    found = OBJECTS_OF_ROUTES.get(path) or OBJECTS.get(name)
    assert found, (
        f"{path}: add to OBJECTS how to make the object that {{{name}}} names, and to SHARED if all may see it."
    )
    return found


def name_what_examples_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the function and the destination that the example of a workflow names."""
    monkeypatch.setenv("OUTBOX_DESTINATIONS", json.dumps({"crm": "https://crm.example/?secret=0123456789abcdef"}))
    settings.current.cache_clear()
    monkeypatch.setitem(functions._registered, "shorten", lambda given: given.input)
