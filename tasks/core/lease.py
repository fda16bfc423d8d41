"""A lease in the hands of this process: its token, how long it is good, and the task that may be lost alone."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Watched:
    """A task that runs outside a transaction, and how to reach its handler. It may be lost alone, without its lease."""

    task_id: uuid.UUID
    interrupt: Callable[[Exception], None]
    is_lost: bool = False


@dataclass(slots=True)
class Held:
    """A lease of this process."""

    token: uuid.UUID
    deadline: float  # of `time.monotonic()`, taken before the last renewal
    hard_limit_at: float | None = None  # of whatever runs now
    is_lost: bool = False
    watched: Watched | None = None  # changed as a whole: the heartbeat's thread reads it

    @property
    def is_good(self) -> bool:
        """Whether something may still be done in its name."""
        watched = self.watched
        is_lost = self.is_lost or (watched is not None and watched.is_lost)
        return not is_lost and time.monotonic() < self.deadline
