"""The time limits of a handler: a soft one that is an exception in it, a hard one that is the end of its process.

The soft limit is a timer of the process (SIGALRM), which interrupts whatever the handler waits for. The hard one is
watched by the heartbeat's thread, and by Celery's own `task_time_limit` for code that never lets another thread run.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class SoftTimeLimit(Exception):
    """The handler has used up its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The handler took longer than {seconds:g} s.")


@contextmanager
def soft_limit(seconds: float) -> Iterator[None]:
    """Raises SoftTimeLimit in the block after so many seconds. Outside the main thread there is no such timer."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise SoftTimeLimit(seconds)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
