"""Ask other servers for a page, such as the broker and sinks, without letting the page wait for them.

A page waits for PATIENCE_SECONDS at most. A question that takes longer goes on, and the next load of the page gets its
answer. Until then the same question is not asked again, and an answer serves all pages for KEPT_SECONDS: a server that
hangs costs one thread for each question, and not one for each look. The threads are not those of the ledger.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import settings
from models.process_singleton import OnePerProcess
from tasks.execution.daemon_threads import DaemonThreads

PATIENCE_SECONDS: Final = 0.5
KEPT_SECONDS: Final = 1.0
THREADS: Final = 6
T = TypeVar("T")


class Questions:
    """The questions of this process that are being asked, and the answers of the last moment."""

    def __init__(self, current: settings.Settings) -> None:
        self.settings = current
        self._threads = DaemonThreads(THREADS, name="console-questions")
        self._asked: dict[Hashable, Future[Any]] = {}
        self._answered_at: dict[Hashable, float] = {}
        self._lock = threading.Lock()

    def ask(self, question: Hashable, function: Callable[[], T]) -> Future[T]:
        """Return the answer to come. `function` must not raise; it is called unless the question is being asked."""
        with self._lock:
            self._forget_old()
            if question not in self._asked:
                self._asked[question] = self._threads.submit(self._answer, question, function)
            return self._asked[question]

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _answer(self, question: Hashable, function: Callable[[], T]) -> T:
        try:
            return function()
        finally:
            self._answered_at[question] = time.monotonic()

    def _forget_old(self) -> None:
        for question, at in list(self._answered_at.items()):
            if time.monotonic() - at >= KEPT_SECONDS:
                self._answered_at.pop(question, None)
                self._asked.pop(question, None)


# The broker has threads of its own: sinks that hang must not keep it from being asked.
broker_questions: Final = OnePerProcess(Questions)
sink_questions: Final = OnePerProcess(Questions)


async def answers(asked: Sequence[Future[T]]) -> list[T | None]:
    """Return the answers in their order; None for one that has not come in time."""
    if not asked:
        return []
    coming = [asyncio.wrap_future(each) for each in asked]
    done, _ = await asyncio.wait(coming, timeout=PATIENCE_SECONDS)
    return [each.result() if each in done and not each.cancelled() else None for each in coming]
