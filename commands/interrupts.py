"""Ctrl-C between two steps: what was begun is finished, and the command says how far it got."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

INTERRUPTED: Final = 130  # the exit code of whoever ends by SIGINT


@contextmanager
def until_interrupted() -> Iterator[threading.Event]:
    """The event is set by the first Ctrl-C or SIGTERM. A second one ends the program at once."""
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
