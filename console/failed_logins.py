"""Limit how often a caller may try to log in. A secret of 256 random bits cannot be guessed; this keeps the noise down.

Each process counts for itself. Behind a proxy that does not send X-Forwarded-For, all callers are one.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final

MOST_FAILURES: Final = 10
WINDOW_SECONDS: Final = 60.0
MOST_CALLERS: Final = 10_000


class FailedLogins:
    """The times of the latest failures, by the address of the caller."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, list[float]] = OrderedDict()

    def are_too_many(self, caller: str) -> bool:
        return len(self._recent(caller)) >= MOST_FAILURES

    def add(self, caller: str) -> None:
        self._failures[caller] = [*self._recent(caller), time.monotonic()]
        self._failures.move_to_end(caller)
        while len(self._failures) > MOST_CALLERS:
            self._failures.popitem(last=False)

    def forget(self) -> None:
        self._failures.clear()

    def _recent(self, caller: str) -> list[float]:
        since = time.monotonic() - WINDOW_SECONDS
        return [at for at in self._failures.get(caller, ()) if at > since]
