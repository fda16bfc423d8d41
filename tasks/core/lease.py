"""The lease that this process holds on a batch of tasks.

The ledger is authoritative: the token must match the one in the task's row for every write. `deadline` is this
process's own estimate of when the lease ends. After it, or when the heartbeat finds the lease gone, the holder starts
nothing more for these tasks; what it still writes is refused by the token.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class WatchedTask:
    """A task whose handler runs outside a transaction. It can be lost while the lease of its batch stays valid."""

    task_id: uuid.UUID
    interrupt: Callable[[Exception], None]
    is_lost: bool = False


@dataclass(slots=True)
class HeldLease:
    """A lease of this process."""

    token: uuid.UUID
    deadline: float  # of `time.monotonic()`; counted from before the last renewal was sent
    hard_limit_at: float | None = None  # of the handler that runs now
    is_lost: bool = False
    watched: WatchedTask | None = None  # replaced as a whole, because the heartbeat's thread reads it

    @property
    def is_good(self) -> bool:
        """Whether this process may still work on the tasks of this lease."""
        watched = self.watched
        is_lost = self.is_lost or (watched is not None and watched.is_lost)
        return not is_lost and time.monotonic() < self.deadline
