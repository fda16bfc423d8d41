"""The time limits of a handler: a soft one that is an exception in it, a hard one that is the end of its process.

The soft limit is a timer of the process (SIGALRM). It strikes where Python runs or waits; a statement that the database
is working on ends first. The hard one is watched by the heartbeat's thread, and by Celery's own `task_time_limit` for
code that never lets another thread run.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeVar

Result = TypeVar("Result")
AT_ONCE_SECONDS: Final = 1e-6  # 0 would mean never


class SoftTimeLimit(Exception):
    """The handler has used up its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The handler took longer than {seconds:g} s.")


def call_within(seconds: float, function: Callable[..., Result], *arguments: Any) -> Result:
    """Raises SoftTimeLimit in the function after so many seconds, and never anywhere else.

    Outside the main thread there is no such timer.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(*arguments)
    timer = _Timer(seconds)
    try:
        try:
            timer.start()
            return function(*arguments)
        finally:
            timer.stop()  # the alarm may interrupt even this, once
    finally:
        timer.stop()


class _Timer:
    """An alarm that may ring once. Whoever had an alarm of their own before gets it back, with the time that is left.

    The function may use alarms itself: it then has no soft limit, and its alarms end with it.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.may_ring = self.is_set = False

    def start(self) -> None:
        self.started_at = time.monotonic()
        self.timer_before = signal.getitimer(signal.ITIMER_REAL)
        self.handler_before = signal.signal(signal.SIGALRM, self._ring) or signal.SIG_DFL
        self.is_set = self.may_ring = True
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def stop(self) -> None:
        self.may_ring = False
        if not self.is_set:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.handler_before)
        self.is_set = False
        left, interval = self.timer_before
        if left:
            passed = time.monotonic() - self.started_at
            signal.setitimer(signal.ITIMER_REAL, max(left - passed, AT_ONCE_SECONDS), interval)

    def _ring(self, _number: int, _frame: FrameType | None) -> None:
        if self.may_ring:
            self.may_ring = False
            raise SoftTimeLimit(self.seconds)
