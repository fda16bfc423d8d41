"""The states of a task and of an event, and the ways between them (P1).

Status set = these enums = the SQL CHECKs = the JSON values; `tests/models/test_status.py` holds them together.

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
    """Where a task stands."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    RETRYING = "RETRYING"
    SUCCEEDED = "SUCCEEDED"
    DEAD = "DEAD"
    DISCARDED = "DISCARDED"


class EventStatus(StrEnum):
    """Where an outbox event stands."""

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
