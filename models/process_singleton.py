"""Background threads of which each process has one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import settings


class Background(Protocol):
    """An object with a background thread, and the settings that it was made for."""

    @property
    def settings(self) -> settings.Settings: ...

    def close(self) -> None: ...


B = TypeVar("B", bound=Background)


class OnePerProcess(Generic[B]):
    """Makes the object at the first call, and again if the settings have changed.

    A forked child has no copy of its parent's thread, and the lock may be held for ever: it starts with new ones.
    """

    def __init__(self, make: Callable[[settings.Settings], B]) -> None:
        self._make = make
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
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
