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
from typing import Any, Final, Self, TypeVar

Result = TypeVar("Result")
AT_ONCE_SECONDS: Final = 1e-6  # 0 would mean never
TOLERANCE_SECONDS: Final = 0.1  # between what was set and what a timer says is left


class SoftTimeLimit(Exception):
    """The handler has used up its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The handler took longer than {seconds:g} s.")


def call_within(seconds: float, function: Callable[..., Result], *arguments: Any) -> Result:
    """One call with a limit of its own."""
    with SoftLimit(seconds) as limit:
        return limit.call(function, *arguments)


class SoftLimit:
    """Raises SoftTimeLimit in a call that takes longer, and never anywhere else. Many calls may share it.

    The alarm is set once and looks, when it fires, how long the call of that moment has been running: a batch of a
    hundred short calls costs no signal at all. Whoever had an alarm before gets it back with the time that is left. A
    function may use alarms itself: it then has no soft limit, and its alarms end with it. Outside the main thread there
    is no such timer.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.may_interrupt = False
        self.calls = 0
        self.interruption: tuple[int, Exception] | None = None  # in which call, and with what
        self.limit_at = 0.0
        self.alarm_at: float | None = None  # None: no alarm of ours is set

    def __enter__(self) -> Self:
        self.is_there = threading.current_thread() is threading.main_thread()
        if self.is_there:
            self.entered_at = time.monotonic()
            self.timer_before = signal.getitimer(signal.ITIMER_REAL)
            self.handler_before = signal.signal(signal.SIGALRM, self._on_alarm) or signal.SIG_DFL
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_there:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.handler_before)
        left, interval = self.timer_before
        if left:
            passed = time.monotonic() - self.entered_at
            signal.setitimer(signal.ITIMER_REAL, max(left - passed, AT_ONCE_SECONDS), interval)

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        if not self.is_there:
            return function(*arguments)
        self.calls += 1
        self.limit_at = time.monotonic() + self.seconds
        try:
            self.may_interrupt = True
            if self.alarm_at is None:  # asked now: an alarm of the call before may fire up to this moment
                self._set_alarm(self.seconds)
            return function(*arguments)
        finally:
            self.may_interrupt = False  # the alarm may interrupt even this, once
            self._undo_alarms_of_the_function()

    def interrupter_of_next_call(self) -> Callable[[Exception], None]:
        """For another thread: raises an exception in that call, while it is under way, and in no other."""
        number = self.calls + 1

        def interrupt(error: Exception) -> None:
            if self.is_there and self.may_interrupt and self.calls == number:
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
        """There is one timer for each process: if it says anything else than what we set, the function has used it."""
        expected_at = self.alarm_at
        if expected_at is None:
            return
        left = signal.getitimer(signal.ITIMER_REAL)[0]
        if abs(expected_at - time.monotonic() - left) > TOLERANCE_SECONDS:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._on_alarm)
            self.alarm_at = None
