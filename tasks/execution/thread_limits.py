"""Raise an exception in a handler that runs in a thread: its soft limit, a lost lease, or a worker that stops.

Signals reach the main thread only. In any other thread the interpreter raises an exception when it next executes Python
code (`PyThreadState_SetAsyncExc`). A system call is not interrupted: it ends first, so handlers for `-P threads` must
give time-outs to what they wait for. One thread of the process watches all calls.

The exception is raised in the call that it is meant for, or not at all. It is sent under a lock, at most once per call,
and only while the call is under way. When the function has returned, the lock is taken once more and an exception that
did not arrive yet is withdrawn.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Self, TypeVar

from tasks.execution.stopping import WorkerStops

Result = TypeVar("Result")
LOOK_SECONDS: Final = 0.05  # how often the calls are looked at
_set_async_exception: Final = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exception.argtypes = (ctypes.c_ulong, ctypes.c_void_p)


class ThreadLimit:
    """The soft limit of the calls of one thread. `exceeded` returns what is raised in a call that takes longer."""

    def __init__(self, seconds: float, exceeded: Callable[[], Exception]) -> None:
        self.seconds = seconds
        self.exceeded = exceeded
        self.calls = 0
        self.limit_at = 0.0
        self._is_running = False
        self._is_sent = False
        self._class: type[BaseException] | None = None  # kept until it was raised
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._process = os.getpid()
        _clock.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _clock.remove(self)

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        try:
            self._begin()
            return function(*arguments)
        finally:
            if os.getpid() == self._process:  # a forked child ends soon, and its copy of the lock may never be released
                try:
                    self._end()
                except BaseException:
                    self._end()  # an exception can arrive even here, but only one
                    raise

    def interrupter_of_next_call(self) -> Callable[[Exception], None]:
        """Return a function that raises an exception in that call, while it is under way, and in no other."""
        number = self.calls + 1
        return lambda error: self._send(number, error)

    def look(self, *, stops: bool) -> None:
        """Interrupt the call that is under way if its time is over, or if the worker stops."""
        if stops:
            self._send(self.calls, WorkerStops())
        elif self._is_running and time.monotonic() >= self.limit_at:
            self._send(self.calls, self.exceeded())

    def _begin(self) -> None:
        if _clock.stops:
            raise WorkerStops
        with self._lock:
            self.calls += 1
            self.limit_at = time.monotonic() + self.seconds
            self._is_sent = False
            self._is_running = True

    def _end(self) -> None:
        with self._lock:
            self._is_running = False
        if self._is_sent:
            _set_async_exception(self._thread, None)

    def _send(self, number: int, error: BaseException) -> None:
        with self._lock:
            if self._is_running and self.calls == number and not self._is_sent and not _is_logging(self._thread):
                self._is_sent = True
                self._class = _class_that_raises(error)
                _set_async_exception(self._thread, id(self._class))


class _Clock:
    """The thread that looks at all calls of the process. It starts with the first one."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start with no calls, also in a forked child, which has no copy of the thread."""
        self.stops = False
        self._limits: set[ThreadLimit] = set()
        self._lock = threading.Lock()
        self._has_calls = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, limit: ThreadLimit) -> None:
        with self._lock:
            self._limits.add(limit)
            self._has_calls.set()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="thread-limits", daemon=True)
                thread.start()
                self._thread = thread

    def remove(self, limit: ThreadLimit) -> None:
        with self._lock:
            self._limits.discard(limit)

    def _run(self) -> None:
        while self._has_calls.wait():
            with self._lock:
                limits = list(self._limits)
                if not limits:
                    self._has_calls.clear()
            for limit in limits:
                limit.look(stops=self.stops)
            time.sleep(LOOK_SECONDS)


_clock: Final = _Clock()
os.register_at_fork(after_in_child=_clock.forget)


def stop_all_calls() -> None:
    """Raise WorkerStops in every call of a thread, now and from now on: the worker ends."""
    _clock.stops = True


def _is_logging(thread: int) -> bool:
    """Return True while the thread writes a log line: interrupted there, it may keep a lock that all threads need."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename == logging.__file__:
            return True
        frame = frame.f_back
    return False


def _class_that_raises(error: BaseException) -> type[BaseException]:
    """Return a class like that of the error, which needs no arguments: only a class can be sent to a thread."""
    kind = type(error)

    def __init__(self: BaseException) -> None:
        BaseException.__init__(self, *error.args)

    names = {"__init__": __init__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)
