"""Threads that the end of the process does not wait for.

Python waits at its end for the threads of a `ThreadPoolExecutor`. A worker whose handlers run in its main process would
then never end if a function hangs in one of them: nothing can stop it. Its task was released already.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

Call = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads(ThreadPoolExecutor):
    """At most so many threads, started when they are needed.

    An event loop accepts only subclasses of `ThreadPoolExecutor` as its default. The methods of the class are
    replaced, so it has no threads of its own.
    """

    def __init__(self, most: int, *, name: str) -> None:
        super().__init__(most, thread_name_prefix=name)
        self._most = most
        self._name = name
        self._calls: SimpleQueue[Call | None] = SimpleQueue()  # None ends a thread
        self._idle = threading.Semaphore(0)
        self._started = 0
        self._changing = threading.Lock()
        self._is_closed = False

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._changing:
            if self._is_closed:
                raise RuntimeError("These threads have ended; they take no further calls.")
            self._calls.put((future, partial(function, *arguments, **options)))
            if not self._idle.acquire(blocking=False) and self._started < self._most:
                name = f"{self._name}-{self._started}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._started += 1
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Take no further calls. It never waits for the threads."""
        with self._changing:
            self._is_closed = True
            if cancel_futures:
                self._cancel_waiting()
            for _ in range(self._started):
                self._calls.put(None)

    def _cancel_waiting(self) -> None:
        try:
            while True:
                if waiting := self._calls.get_nowait():
                    waiting[0].cancel()
        except Empty:
            return

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            _run(*call)
            del call  # its result may be large
            self._idle.release()


def _run(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except StopIteration as error:  # an event loop cannot pass it on: who waits for the result would wait for ever
        stopped = RuntimeError("The function raised StopIteration.")
        stopped.__cause__ = error
        future.set_exception(stopped)
    except BaseException as error:
        future.set_exception(error)
        future = None  # type: ignore[assignment]  # the error's traceback refers to this frame
    else:
        future.set_result(result)
