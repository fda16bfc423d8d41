"""The pools of a worker (`celery worker -P …`) that run handlers, and how each of them stops.

    prefork   a handler has a process of its own: limits are signals, and a process can be killed; the default
    solo      one handler at a time in the main process; for debugging
    threads   many handlers in one process, for handlers that wait for the network

`-P gevent` and `-P eventlet` are refused: the PostgreSQL driver blocks the whole process while it waits, and the
heartbeat and all limits with it.

A worker that gets SIGTERM (with REMAP_SIGTERM=SIGQUIT) releases its tasks within seconds, and none of them is charged.
In prefork Celery sends a signal to the children. In the other pools `WorkerStops` is raised in the handlers. A thread
that waits in a system call does not notice that, so its tasks are released without it, and the process ends.

A prefork pool grows and shrinks while it runs (`PoolSize`), as the ledger asks for.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Any, Final

from celery.concurrency import get_implementation, prefork, solo, thread
from celery.worker import state

from models.engine import engine
from models.errors import Misuse
from tasks.core.outcomes import Released
from tasks.execution.heartbeat import end_process_with, heartbeat
from tasks.execution.settle import release_unstarted
from tasks.execution.stopping import WorkerStops
from tasks.execution.thread_limits import stop_all_calls
from tasks.operations.scale import report_size

logger = logging.getLogger(__name__)

STOP_SECONDS: Final = 2.0  # for handlers to end after WorkerStops; Celery has given them five seconds before
GOODBYE_SECONDS: Final = 1.0  # for Celery to return its messages, while a thread hangs
HARD_LIMIT_SECONDS: Final = 20.0  # after a hard limit the process ends in any case
SIZE_SECONDS: Final = 0.9  # between two comparisons of a pool with the ledger; the watch looks twice a second


class UnsupportedPool(Misuse):
    """This pool cannot run handlers: use -P prefork, or -P threads for handlers that wait for the network.

    A worker was started with `-P gevent`, `-P eventlet` or a pool of its own. PostgreSQL's driver blocks all greenlets
    while it waits, so that heartbeats and limits would stop.
    """

    code = "unsupported_pool"
    remedy = "Start the worker with `-P prefork` (the default), `-P threads` or `-P solo`."


class SoloPool(solo.TaskPool):
    """Runs a handler in the main process, and interrupts it when the worker stops."""

    def terminate_job(self, *_: Any) -> None:
        """Raise out of the signal handler, into the handler that it interrupted."""
        raise WorkerStops


class ThreadPool(thread.TaskPool):
    """Runs handlers in threads, and does not wait for a thread that hangs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._running: set[Future[Any]] = set()

    def on_start(self) -> None:
        end_process_with(end_worker)

    def on_apply(self, *args: Any, **options: Any) -> Any:
        applied = super().on_apply(*args, **options)
        self._running.add(applied.f)
        applied.f.add_done_callback(self._running.discard)
        return applied

    def terminate_job(self, *_: Any) -> None:
        """Do nothing: Celery cannot say which thread it means. When the worker stops, `on_stop` interrupts them all."""

    def on_stop(self) -> None:
        if not state.should_terminate:
            super().on_stop()  # waits until all handlers have finished
            return
        stop_all_calls()
        self.executor.shutdown(wait=False, cancel_futures=True)
        if wait(tuple(self._running), STOP_SECONDS).not_done:
            _in_background(_leave_hanging_threads)


class PoolSize:
    """Keeps a prefork pool at the size that the ledger asks for; without a target, at the size it was started with.

    The watch calls `check` in its thread. The pool is changed by the thread of Celery's event loop only, which also
    gives it its jobs: so a process that is idle there has no job, and can be ended without harm. A process that is
    busy is ended by a later check, when it is idle.
    """

    def __init__(self, consumer: Any, *, worker: str, queues: Collection[str]) -> None:
        self.consumer = consumer
        self.worker = worker
        self.queues = queues
        self._own = self._size
        self._check_at = 0.0

    @staticmethod
    def can_change(consumer: Any) -> bool:
        return isinstance(consumer.pool, prefork.TaskPool) and not consumer.controller.autoscaler

    @property
    def _size(self) -> int:
        return int(self.consumer.pool.num_processes)

    def check(self) -> bool:
        """Report the size, and change it if the ledger asks for another one. Return False if that is not due."""
        now = time.monotonic()
        if now < self._check_at:
            return False
        self._check_at = now + SIZE_SECONDS
        target = report_size(engine(), worker=self.worker, queues=self.queues, processes=self._size)
        wanted = target or self._own
        if wanted != self._size:
            self.consumer.call_soon(self._change, wanted)
        return True

    def _change(self, wanted: int) -> None:
        if self.consumer.task_consumer is None or self.consumer.qos is None:
            return  # there is no connection now; the next check tries again
        pool, before = self.consumer.pool, self._size
        if wanted > before:
            pool.grow(wanted - before)
            pool._pool.maintain_pool()  # starts them now instead of within five seconds
        for process in self._idle_processes()[: max(0, before - wanted)]:
            self._end(process)
        if changed := self._size - before:
            fields = {"event": "worker_resized", "processes": self._size}
            logger.warning("This worker has %d processes now; it had %d.", self._size, before, extra=fields)
            self.consumer._update_prefetch_count(changed)
            if not self.consumer.qos_global:
                self._consume_again()

    def _idle_processes(self) -> list[Any]:
        pool = self.consumer.pool._pool
        return [
            process
            for process in pool._pool
            if process.inqW_fd not in pool._busy_workers
            and not process._controlled_termination
            and not pool._worker_active(process)
        ]

    def _end(self, process: Any) -> None:
        """End one process as `billiard.pool.Pool.shrink` does, which may also choose one that was just given a job."""
        pool = self.consumer.pool._pool
        pool._processes -= 1
        if pool._putlock:
            pool._putlock.shrink()
        pool._busy_workers.add(process.inqW_fd)  # it gets no job until it has ended
        process.terminate_controlled()

    def _consume_again(self) -> None:
        """Register the consumers again: on quorum queues a prefetch count holds for new consumers only."""
        self.consumer.qos.update()
        self.consumer.task_consumer.cancel()
        self.consumer.task_consumer.consume()


def supported_pool(pool: Any) -> type[Any]:
    """Return our version of the pool that was asked for."""
    name = pool if isinstance(pool, str) else f"{pool.__module__}:{pool.__qualname__}"
    if "gevent" in name or "eventlet" in name:  # not imported: the package may be missing
        raise UnsupportedPool
    found: type[Any] = get_implementation(pool)
    for celerys, ours in _POOLS.items():
        if issubclass(found, celerys):
            return ours if ours is not celerys else found
    raise UnsupportedPool


_POOLS: Final[dict[type[Any], type[Any]]] = {
    prefork.TaskPool: prefork.TaskPool,
    solo.TaskPool: SoloPool,
    thread.TaskPool: ThreadPool,
}


def end_worker() -> None:
    """End this worker because a handler exceeded its hard limit: the others get five seconds, then they are released.

    SIGQUIT and not SIGTERM, which waits for all handlers unless REMAP_SIGTERM is set.
    """
    if not _ending.is_set():
        _ending.set()
        _in_background(_end_in_any_case)
        os.kill(os.getpid(), signal.SIGQUIT)


_ending: Final = threading.Event()


def _end_in_any_case() -> None:
    time.sleep(HARD_LIMIT_SECONDS)
    _leave_hanging_threads()


def _leave_hanging_threads() -> None:
    """Release the tasks of threads that hang, and end the process, which would wait for them for ever."""
    until = time.monotonic() + GOODBYE_SECONDS
    left = heartbeat().held()
    logger.warning(
        "Threads that did not stop: %d. Their tasks are released, and the process ends.",
        len(left),
        extra={"event": "threads_abandoned"},
    )
    for lease in left:
        lease.is_lost = True
    for token in {lease.token for lease in left}:  # tasks of an async handler share one
        release_unstarted(engine(), token, Released("the worker stopped; its thread did not"))
    time.sleep(max(0.0, until - time.monotonic()))
    logging.shutdown()
    os._exit(1)


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="end-of-worker", daemon=True).start()
