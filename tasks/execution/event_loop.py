"""The event loop of this process for async handlers, and the watch that reports a handler that blocks it.

The loop stays open between two messages, so that a handler can keep an HTTP client in a global variable.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Self

import metrics
from tasks.execution.daemon_threads import DaemonThreads
from tasks.execution.thread_limits import ThreadLimit
from tasks.execution.time_limits import SoftTimeLimit
from tracing import TracedTask, task_fields

logger = logging.getLogger(__name__)

BLOCKED_SECONDS: Final = 1.0
BEAT_SECONDS: Final = 0.25
LATE_SECONDS: Final = 0.05  # a timer that fires later than this was held up by something that blocked the loop
FUNCTION_THREADS: Final = 32  # for plain functions that are given to a step
_local = threading.local()


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this thread. A forked child gets a new one."""
    if getattr(_local, "pid", None) != os.getpid() or _local.loop.is_closed():
        _local.loop = asyncio.new_event_loop()
        _local.loop.set_default_executor(DaemonThreads(FUNCTION_THREADS, name="async-function"))
        _local.pid = os.getpid()
    loop: asyncio.AbstractEventLoop = _local.loop
    return loop


def interruptible(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function so that a worker that stops can interrupt it: in the main thread by a signal."""
    if threading.current_thread() is threading.main_thread():
        return function(*arguments)
    with ThreadLimit(math.inf, TimeoutError) as limit:  # without a limit; `stop_all_calls` raises WorkerStops in it
        return limit.call(function, *arguments)


@asynccontextmanager
async def soft_limit_on_loop(seconds: float) -> AsyncIterator[None]:
    """Cancel the block after so many seconds, and raise SoftTimeLimit instead.

    If something has blocked the event loop, this comes late. The block could not go on meanwhile, so it gets the time
    by which this was late once more: otherwise one handler that blocks would time out all its neighbours.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as limit:
            timer: asyncio.TimerHandle

            def expire(due_at: float, *, may_extend: bool = True) -> None:
                nonlocal timer
                late = loop.time() - due_at
                if may_extend and late > LATE_SECONDS:
                    timer = loop.call_later(late, partial(expire, loop.time() + late, may_extend=False))
                else:
                    limit.reschedule(loop.time())  # after the handlers that can go on now

            timer = loop.call_later(seconds, expire, loop.time() + seconds)
            try:
                yield
            finally:
                timer.cancel()
    except TimeoutError as error:
        if limit.expired():
            raise SoftTimeLimit(seconds) from error
        raise


class LoopWatch:
    """Reports a handler that blocks the event loop, while it does: all other handlers stand still meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop, type: str) -> None:
        self._loop = loop
        self._type = type
        self.find_task: Callable[[asyncio.Task[Any]], TracedTask | None] = lambda _: None  # whose handler it runs
        self._alive_at = time.monotonic()
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        self._beat()
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._timer.cancel()

    def _beat(self) -> None:
        self._alive_at = time.monotonic()
        self._timer = self._loop.call_later(BEAT_SECONDS, self._beat)

    def _watch(self) -> None:
        reported = 0.0  # the beat after which the loop was reported
        while not self._closed.wait(BEAT_SECONDS):
            alive_at = self._alive_at
            if time.monotonic() - alive_at > BLOCKED_SECONDS + BEAT_SECONDS and alive_at != reported:
                reported = alive_at
                self._report()

    def _report(self) -> None:
        current = asyncio.current_task(self._loop)
        task = self.find_task(current) if current else None
        metrics.LOOP_BLOCKED_TOTAL.inc()
        logger.warning(
            "A handler blocks the event loop for more than %g s: %s. Let it await, or use `asyncio.to_thread`.",
            BLOCKED_SECONDS,
            current.get_name() if current else self._type,
            extra=task_fields("loop_blocked", task) if task else {"event": "loop_blocked", "type": self._type},
        )
