"""The soft time limit of a handler: an exception that is raised inside it.

The limit uses the timer of the process (SIGALRM). Python raises the exception between two instructions of Python code,
so it interrupts a sleep or a read from the network, but not a statement that the database is executing: psycopg2 waits
for its end first. Signals reach the main thread only; in other threads `thread_limits.py` raises the exception.

The hard limit, which kills the process, is enforced by the thread of `heartbeat.py`, and by the worker's main process
for code that never lets another thread run (`hard_limits.py`). Celery's own limits are off.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Self, TypeVar

from tasks.execution.thread_limits import ThreadLimit

Result = TypeVar("Result")
AT_ONCE_SECONDS: Final = 1e-6  # setitimer takes 0 as "never"
TOLERANCE_SECONDS: Final = 0.1  # how much the remaining time of our alarm may differ from what we expect


class SoftTimeLimit(Exception):
    """The handler has reached its soft limit."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The handler exceeded its soft limit of {seconds:g} s.")


def soft_limit(seconds: float) -> SoftLimit | ThreadLimit:
    """Return the limit that works in this thread."""
    if threading.current_thread() is threading.main_thread():
        return SoftLimit(seconds)
    return ThreadLimit(seconds, lambda: SoftTimeLimit(seconds))


def call_within(seconds: float, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function with a soft limit, and return what it returns."""
    with soft_limit(seconds) as limit:
        return limit.call(function, *arguments)


class SoftLimit:
    """A soft limit for each of many calls. It raises SoftTimeLimit inside a call that takes too long, nowhere else.

    The alarm is set once for all calls. When it fires, it checks how long the current call has been running, and is set
    again for the rest. So a batch of a hundred short calls causes no signal at all.

    An alarm that was set before `__enter__` is set again by `__exit__`, with the time that it has left. A function may
    use alarms itself: it then has no soft limit, and its alarms are cancelled when it returns. Only the main thread can
    use it.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.may_interrupt = False
        self.calls = 0
        self.interruption: tuple[int, Exception] | None = None  # the number of the call, and what to raise in it
        self.limit_at = 0.0
        self.alarm_at: float | None = None  # None: no alarm of ours is set

    def __enter__(self) -> Self:
        self.entered_at = time.monotonic()
        self.timer_before = signal.getitimer(signal.ITIMER_REAL)
        self.handler_before = signal.signal(signal.SIGALRM, self._on_alarm) or signal.SIG_DFL
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.handler_before)
        left, interval = self.timer_before
        if left:
            passed = time.monotonic() - self.entered_at
            signal.setitimer(signal.ITIMER_REAL, max(left - passed, AT_ONCE_SECONDS), interval)

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call the function within the limit."""
        self.calls += 1
        self.limit_at = time.monotonic() + self.seconds
        try:
            self.may_interrupt = True
            if self.alarm_at is None:  # checked last, because the alarm of an earlier call may fire until here
                self._set_alarm(self.seconds)
            return function(*arguments)
        finally:
            self.may_interrupt = False  # the alarm may still fire before this line, once
            self._undo_alarms_of_the_function()

    def interrupter_of_next_call(self) -> Callable[[Exception], None]:
        """Return a function with which another thread raises an exception in the next call, and in no other call."""
        number = self.calls + 1

        def interrupt(error: Exception) -> None:
            if self.may_interrupt and self.calls == number:
                self.interruption = (number, error)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

        return interrupt

    def _on_alarm(self, _number: int, _frame: FrameType | None) -> None:
        if self.may_interrupt and self.interruption is not None and self.interruption[0] == self.calls:
            self.may_interrupt = False
            raise self.interruption[1]
        self.alarm_at = None
        if not self.may_interrupt:
            return
        left = self.limit_at - time.monotonic()
        if left <= 0:
            self.may_interrupt = False
            raise SoftTimeLimit(self.seconds)
        self._set_alarm(left)

    def _set_alarm(self, seconds: float) -> None:
        self.alarm_at = time.monotonic() + seconds
        signal.setitimer(signal.ITIMER_REAL, max(seconds, AT_ONCE_SECONDS))

    def _undo_alarms_of_the_function(self) -> None:
        """Cancel an alarm that the function has set. There is one timer per process, so its remaining time tells."""
        expected_at = self.alarm_at
        if expected_at is None:
            return
        left = signal.getitimer(signal.ITIMER_REAL)[0]
        if abs(expected_at - time.monotonic() - left) > TOLERANCE_SECONDS:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._on_alarm)
            self.alarm_at = None
