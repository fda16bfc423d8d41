"""When the handler of each child process must have ended, in memory that a worker shares with its children.

The heartbeat's thread enforces a hard limit from inside the child. It cannot do so while a handler never lets another
thread run, as a regular expression or another long call into C does. So each child also writes its limit here, and the
worker's main process kills a child whose limit has passed by `GRACE_SECONDS` (`tasks/worker_watch.py`).

The memory is mapped before the first fork. A child has one slot, by its place in the pool: a new child gets the place
of the one that it replaces. Times are those of `time.monotonic()`, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Collection
from typing import Final, NamedTuple

GRACE_SECONDS: Final = 3.0  # for the heartbeat's thread of the child, which may have to wait for the ledger
SLOTS: Final = 4096  # children with a higher place have no slot; a worker has one child for each core or so
_PID, _SECONDS, _AT = range(3)  # the numbers in a slot
_SLOT: Final = 3  # how many there are
_NUMBER_BYTES: Final = 8


class Overdue(NamedTuple):
    """A child that did not end although its handler's hard limit has passed."""

    pid: int
    limit_seconds: float


class HardLimits:
    """The slots of all children. Create it before the first fork, and keep it as long as the worker lives."""

    def __init__(self) -> None:
        self._slots = memoryview(mmap.mmap(-1, SLOTS * _SLOT * _NUMBER_BYTES)).cast("d")

    def use_slot(self, place: int) -> None:
        """Let this process write its limits into the slot of this place in the pool."""
        if 0 <= place < SLOTS:
            own = self._slots[place * _SLOT : (place + 1) * _SLOT]
            own[_AT] = 0.0  # the slot may still hold the limit of the child that this one replaces
            own[_PID] = os.getpid()
            _own[:] = [own]

    def overdue(self, children: Collection[int]) -> list[Overdue]:
        """Return those of these children whose limit has passed by more than the grace."""
        latest = time.monotonic() - GRACE_SECONDS
        found = []
        for start in range(0, SLOTS * _SLOT, _SLOT):
            pid, seconds, limit_at = self._slots[start : start + _SLOT]
            if pid == 0:  # places are given from 0 on without a gap
                break
            if 0 < limit_at < latest and pid in children:
                found.append(Overdue(int(pid), seconds))
        return found


_own: Final[list[memoryview[float]]] = []  # the slot of this process, if it has one


def note_limit(limit_at: float, seconds: float) -> None:
    """Note until when the handler that starts now must have ended."""
    for slot in _own:
        slot[_SECONDS] = seconds
        slot[_AT] = limit_at


def forget_limit() -> None:
    """Note that no handler runs in this process."""
    for slot in _own:
        slot[_AT] = 0.0
