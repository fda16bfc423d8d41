"""One of a kind in each process: a thread that works in the background, with all that it owns."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import settings


class Background(Protocol):
    @property
    def settings(self) -> settings.Settings: ...

    def close(self) -> None: ...


B = TypeVar("B", bound=Background)


class OnePerProcess(Generic[B]):
    """Made when it is first asked for, and anew under other settings.

    A forked child has neither its parent's thread nor a right to its lock: it begins again.
    """

    def __init__(self, make: Callable[[settings.Settings], B]) -> None:
        self._make = make
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self.made: B | None = None

    def __call__(self) -> B:
        with self._lock:
            current = settings.current()
            if self.made is None or self.made.settings is not current:
                if self.made is not None:
                    self.made.close()
                self.made = self._make(current)
            return self.made
