"""Call the ledger from a route: in a thread, and with a deadline.

A PostgreSQL that is silent (stopped, or on a host that hangs) still acknowledges packets, so neither a socket nor
`statement_timeout` notices it, and psycopg2 waits as long as the silence lasts. The request does not: after SECONDS it
is answered 503, and its thread is left to wait. There are THREADS threads and no more, one for each connection of the
pool. While all of them wait, further requests wait for a thread, and are answered 503 in time as well.

A call that sends much gets more time, but only after the ledger has answered a short call. So only a silence that
begins in the middle of it is noticed later.

The threads are daemons, so that a process that is stopped during the silence ends at once. A call that was given up may
still take effect, as after any lost answer; an idempotency key makes it safe to repeat.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context  # with the trace of the request
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from models.clock import now
from models.engine import engine
from models.errors import Unreachable

T = TypeVar("T")
SECONDS: Final = 3.5  # together with the rest of a request less than 5
SPARE_SECONDS: Final = 0.5  # how much longer a call may take without a short call before it
THREADS: Final = 15  # SQLAlchemy's pool has 5 connections, and 10 more when they are needed


async def call_ledger(function: Callable[[], T], *, more_seconds: float = 0.0) -> T:
    """Return what the function returns, or raise Unreachable if it takes longer than SECONDS.

    `more_seconds` is for a call that sends much to the ledger. If the ledger is silent already, the call is not made.
    It is negative for a call in a request that has already waited for something else.
    """
    if more_seconds > SPARE_SECONDS:
        await call_ledger(_read_clock)
    seconds = SECONDS + more_seconds
    try:
        async with asyncio.timeout(seconds) as limit:
            return await asyncio.wrap_future(_threads.submit(partial(copy_context().run, function)))
    except TimeoutError:
        if limit.expired():
            raise Unreachable(f"The ledger did not answer within {seconds:g} s.") from None
        raise


def _read_clock() -> None:
    with engine().connect() as connection:
        now(connection)


class _Threads:
    """Daemon threads that run functions in order. A function that was cancelled before its turn is skipped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._started = 0
        self._lock = threading.Lock()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, function))
        with self._lock:
            if self._started < self._most:
                self._started += 1
                threading.Thread(target=self._run, name=f"ledger-{self._started}", daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            future, function = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del future, function  # an idle thread must not keep a payload in memory


_threads: Final = _Threads(THREADS)
