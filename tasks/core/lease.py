"""The lease that this process holds on a batch of tasks.

The ledger is authoritative: the token must match the one in the task's row for every write. `deadline` is this
process's own estimate of when the lease ends. After it, another worker may take the tasks, but as long as none has, the
lease can be renewed: `check` asks the ledger, and waits for it if it is unreachable.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from models.errors import LeaseLost
from tracing import TracedTask


def _cannot_renew() -> None:
    """Do nothing: without a heartbeat, a lease ends at its deadline."""


@dataclass(slots=True)
class WatchedTask:
    """A task whose handler is running. It can be lost while the lease of its batch stays valid."""

    task_id: uuid.UUID
    interrupt: Callable[[Exception], None]
    is_lost: bool = False


@dataclass(slots=True)
class HeldLease:
    """A lease of this process."""

    token: uuid.UUID
    deadline: float  # of `time.monotonic()`; counted from before the last renewal was sent
    hard_limit_at: float | None = None  # of the handler that runs now
    hard_limit_seconds: float = 0.0
    running: TracedTask | None = None  # the task that the hard limit is about; None for a batch handler
    is_lost: bool = False
    watched: WatchedTask | None = None  # replaced as a whole, because the heartbeat's thread reads it
    renew: Callable[[], None] = _cannot_renew  # the heartbeat's; waits for an unreachable ledger

    @property
    def is_good(self) -> bool:
        """Return True if this process knows that it may work on the tasks of this lease."""
        return not self._is_taken and time.monotonic() < self.deadline

    def check(self) -> None:
        """Raise LeaseLost if the lease is lost. A lease that has expired is renewed first, if it can be."""
        if not self.is_good and not self._is_taken:
            self.renew()
        if not self.is_good:
            raise LeaseLost

    @property
    def _is_taken(self) -> bool:
        watched = self.watched
        return self.is_lost or (watched is not None and watched.is_lost)
