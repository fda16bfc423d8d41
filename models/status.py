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
