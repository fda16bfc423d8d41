"""Finish the current step on Ctrl-C, so that the command can report how far it got."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

INTERRUPTED: Final = 130  # the usual exit code after SIGINT


@contextmanager
def until_interrupted() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C or SIGTERM sets. A second one ends the program at once."""
    stopped = threading.Event()

    def stop(*_: Any) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
