"""A circuit per destination (P19): one that does not answer is asked again by one event at a time, ever more rarely.

closed ──nobody answers──► open ──its wait is over──► probing (one event) ──answer──► closed
                             ▲──────────────nobody answers──────────┘
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

SHORTEST_WAIT_SECONDS: Final = 1.0
LONGEST_WAIT_SECONDS: Final = 60.0


@dataclass(slots=True)
class _Open:
    failures: int
    until: float


class Circuits:
    """What this process knows of its destinations. In-process durations: `time.monotonic()` (P13)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()

    def allows(self, destination: str) -> int | None:
        """How many events may be tried now: 0 none, 1 a probe, None as many as there are."""
        with self._lock:
            state = self._open.get(destination)
            if state is None:
                return None
            return 1 if self._clock() >= state.until else 0

    def failed(self, destination: str) -> float:
        """Nobody answered. Returns the wait until the next probe."""
        with self._lock:
            failures = self._open[destination].failures + 1 if destination in self._open else 1
            wait = min(SHORTEST_WAIT_SECONDS * 2.0 ** min(failures - 1, 16), LONGEST_WAIT_SECONDS)
            self._open[destination] = _Open(failures, self._clock() + wait)
            return wait

    def answered(self, destination: str) -> bool:
        """It answered. True if it had not done so before."""
        with self._lock:
            return self._open.pop(destination, None) is not None
