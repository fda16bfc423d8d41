"""How an upload becomes searchable: the steps of its task, which one it has reached, and a sentence about it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from api.tokens import Token
from api.visible_errors import show_task
from console import formats
from documents import ListedDocument
from models.status import TaskStatus
from tasks.operations.task_details import StoredTask


class Mark(StrEnum):
    """How far a step is."""

    DONE = "done"
    NOW = "now"
    FAILED = "failed"
    NEXT = "next"


STEPS: Final = ("Stored", "Waiting for a worker", "Reading the file", "Searchable")
# The marks of the steps for each status of the task.
MARKS: Final = {
    TaskStatus.QUEUED: (Mark.DONE, Mark.NOW, Mark.NEXT, Mark.NEXT),
    TaskStatus.RUNNING: (Mark.DONE, Mark.DONE, Mark.NOW, Mark.NEXT),
    TaskStatus.RETRYING: (Mark.DONE, Mark.DONE, Mark.NOW, Mark.NEXT),
    TaskStatus.SUCCEEDED: (Mark.DONE, Mark.DONE, Mark.DONE, Mark.DONE),
    TaskStatus.DEAD: (Mark.DONE, Mark.DONE, Mark.FAILED, Mark.NEXT),
    TaskStatus.DISCARDED: (Mark.DONE, Mark.NEXT, Mark.NEXT, Mark.NEXT),
}
COUNTED: Final = ("pages", "chunks", "characters")  # of the result


@dataclass(frozen=True, slots=True)
class Ingestion:
    """The task of one upload."""

    task_id: uuid.UUID
    status: TaskStatus
    document: ListedDocument | None  # None: deleted, or the visitor may not read documents
    steps: list[tuple[str, Mark]]
    sentence: str
    error: str


def ingestion_of(task: StoredTask, token: Token, document: ListedDocument | None) -> Ingestion:
    """Return the steps of a task, with its error as the token may read it."""
    steps = list(zip(STEPS, MARKS[task.status], strict=True))
    error = show_task(task, token)["errorMessage"] or ""
    is_failing = task.status in (TaskStatus.RETRYING, TaskStatus.DEAD)
    return Ingestion(task.task_id, task.status, document, steps, _sentence(task), error if is_failing else "")


def _sentence(task: StoredTask) -> str:
    match task.status:
        case TaskStatus.QUEUED:
            return "The file is stored. A worker that consumes the queue will read it."
        case TaskStatus.RUNNING:
            return "A worker reads the file."
        case TaskStatus.RETRYING:
            return "The attempt failed and will be repeated."
        case TaskStatus.SUCCEEDED:
            took = formats.duration((task.finished_at or task.updated_at) - task.created_at)
            return f"The text is searchable{_counts(task)}. This took {took}."
        case TaskStatus.DEAD:
            return "The file could not be read, and there will be no further attempt."
        case TaskStatus.DISCARDED:
            return "The upload was not needed any more: a newer one replaced it, or the document was deleted."


def _counts(task: StoredTask) -> str:
    result = task.result if isinstance(task.result, dict) else {}
    found = [(result[name], name) for name in COUNTED if isinstance(result.get(name), int)]
    words = ", ".join(f"{count:,} {name if count != 1 else name[:-1]}" for count, name in found)
    return f": {words}" if words else ""
