"""The statuses of a task and of an outbox event, and the transitions between them (docs/protocol.md, States).

The enums, the CHECKs of the schema and the JSON values are the same sets; `tests/models/test_status.py` compares them.

    task    QUEUED ─► RUNNING ─► SUCCEEDED                  event   NEW ─► SENT
              ▲          ├─────► RETRYING ─► RUNNING                 ├───► RETRYING ─► SENT
              └ release ─┤                                           └───► DEAD
                         ├─────► DEAD ─► QUEUED (requeue)            DEAD ─► NEW (requeue)
                         └─────► DISCARDED
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class TaskStatus(StrEnum):
    """The status of a task."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    RETRYING = "RETRYING"
    SUCCEEDED = "SUCCEEDED"
    DEAD = "DEAD"
    DISCARDED = "DISCARDED"


class EventStatus(StrEnum):
    """The status of an outbox event."""

    NEW = "NEW"
    RETRYING = "RETRYING"
    SENT = "SENT"
    DEAD = "DEAD"


STATUS_ALIASES: Final = {
    "pending": TaskStatus.QUEUED,
    "processing": TaskStatus.RUNNING,
    "retry": TaskStatus.RETRYING,
    "completed": TaskStatus.SUCCEEDED,
    "suspended": TaskStatus.DEAD,
}


def parse_task_status(given: str) -> TaskStatus:
    """Return the status with this name or older name, in upper or lower case. Raises ValueError with a sentence."""
    try:
        return STATUS_ALIASES.get(given.lower()) or TaskStatus(given.upper())
    except ValueError:
        known = ", ".join((*TaskStatus, *STATUS_ALIASES))
        raise ValueError(f"There is no status {given[:100]!r}. Known: {known}") from None


TASK_TRANSITIONS: Final[dict[TaskStatus | None, frozenset[TaskStatus]]] = {
    None: frozenset({TaskStatus.QUEUED}),
    TaskStatus.QUEUED: frozenset({TaskStatus.RUNNING, TaskStatus.DISCARDED}),
    TaskStatus.RETRYING: frozenset({TaskStatus.RUNNING, TaskStatus.DISCARDED}),
    TaskStatus.RUNNING: frozenset(
        {TaskStatus.SUCCEEDED, TaskStatus.RETRYING, TaskStatus.DEAD, TaskStatus.DISCARDED, TaskStatus.QUEUED}
    ),
    TaskStatus.DEAD: frozenset({TaskStatus.QUEUED, TaskStatus.DISCARDED}),
    TaskStatus.SUCCEEDED: frozenset(),
    TaskStatus.DISCARDED: frozenset(),
}
