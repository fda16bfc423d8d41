"""Pause and resume queues as an operator does."""

from __future__ import annotations

from typing import Any

import settings
from models.engine import engine
from tasks.operations.pauses import pause_queue, resume_queue, wake_resumed


def pause(queue: str = "ingest", **how: Any) -> None:
    pause_queue(engine(), settings.current(), queue, actor="op@here", **how)


def resume(queue: str = "ingest") -> int:
    total = 0
    for woken_so_far in wake_resumed(engine(), resume_queue(engine(), settings.current(), queue)):
        total = woken_so_far.tasks
    return total
