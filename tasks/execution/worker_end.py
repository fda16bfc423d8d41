"""Whether the worker of this process is about to end, in memory that it shares with its children.

On a warm shutdown (SIGTERM without `REMAP_SIGTERM`, Ctrl-C, `celery control shutdown`) Celery gives out no more
messages and waits for those that run. Its children are not told. A message whose process fills free places with other
due tasks would go on for minutes, so the main process says here that it ends, and no more tasks are claimed.
"""

from __future__ import annotations

import mmap
from typing import Final


class WorkerEnd:
    """One byte, which is set when the worker begins to end. Create it before the first fork."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 1)

    @property
    def has_begun(self) -> bool:
        return self._shared[0] != 0

    def begin(self) -> None:
        self._shared[0] = 1


_own: Final[list[WorkerEnd]] = []  # of this process, if it is a worker or one of its children


def use_worker_end(end: WorkerEnd | None) -> None:
    """Let `worker_ends` look here from now on; None: nowhere."""
    _own[:] = [end] if end else []


def worker_ends() -> bool:
    """Return True if no more tasks are to be claimed, because the worker of this process is about to end."""
    return any(end.has_begun for end in _own)
