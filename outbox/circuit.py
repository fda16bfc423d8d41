"""A circuit per destination: an unreachable one is probed with one event at a time, at growing intervals.

closed ──unreachable──► open ──its wait is over──► probing (one event) ──answer──► closed
                         ▲──────────────unreachable──────────┘
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

SHORTEST_WAIT_SECONDS: Final = 1.0
LONGEST_WAIT_SECONDS: Final = 60.0


class Circuits:
    """The circuits of one process, by destination."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, tuple[int, float]] = {}  # failures in a row, and the time of the next probe
        self._lock = threading.Lock()

    def allows(self, destination: str) -> int | None:
        """Return how many events may be tried now: 0 none, 1 a probe, None any number."""
        with self._lock:
            if destination not in self._open:
                return None
            return 1 if self._clock() >= self._open[destination][1] else 0

    def failed(self, destination: str) -> float:
        """Note that the destination is unreachable. Return the seconds until the next probe."""
        with self._lock:
            failures = self._open.get(destination, (0, 0.0))[0] + 1
            wait = wait_seconds(failures)
            self._open[destination] = (failures, self._clock() + wait)
            return wait

    def answered(self, destination: str) -> bool:
        """Note that the destination answered. Return whether it was unreachable before."""
        with self._lock:
            return self._open.pop(destination, None) is not None


def wait_seconds(failures: int) -> float:
    """Return how long a process waits after so many probes in a row without an answer."""
    return min(SHORTEST_WAIT_SECONDS * 2.0 ** min(failures - 1, 16), LONGEST_WAIT_SECONDS)
