"""Wait until a group of tasks is final: SUCCEEDED, DEAD or DISCARDED."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from threading import Event
from typing import Final

from sqlalchemy import Engine

from models.status import TaskStatus
from tasks.operations.listing import FINAL, statuses_of

LOOK_SECONDS: Final = 0.2
Statuses = Counter[TaskStatus | None]  # None: the task does not exist, or was pruned


def watch(engine: Engine, ids: Sequence[uuid.UUID], *, seconds: float, stopped: Event) -> Iterator[Statuses]:
    """Yield the number of tasks by status, repeatedly, until all are final, time is up, or `stopped` is set."""
    deadline = time.monotonic() + seconds
    while True:
        with engine.connect() as connection:
            statuses = statuses_of(connection, ids)
        yield statuses
        left = deadline - time.monotonic()
        if all(status is None or status in FINAL for status in statuses) or left <= 0:
            return
        if stopped.wait(min(LOOK_SECONDS, left)):
            return


def all_succeeded(statuses: Statuses) -> bool:
    return set(statuses) == {TaskStatus.SUCCEEDED}


def in_words(statuses: Statuses) -> str:
    """Return, for example, `3 SUCCEEDED, 1 DEAD`."""
    return ", ".join(f"{number:,} {status or 'gone'}" for status, number in sorted(statuses.items(), key=str))
