"""Forked worker processes that are killed at a failpoint, or paused there until their lease has expired."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import failpoint
import settings
from models.engine import engine
from tasks.execution.deliver import deliver
from tasks.recovery.reclaim import reclaim_leases
from tests.servers import ServersOfTests
from tests.tasks.lost_workers import later

FIRST_RETRY_SECONDS = 60


class Worker:
    """A forked process that runs one task."""

    def __init__(self, task_id: uuid.UUID, failpoints: str) -> None:
        self.paused_seconds = multiprocessing.Value("d", 0.0)
        self.pid = os.fork()
        if self.pid == 0:
            faulthandler.disable()
            real = time.monotonic
            time.monotonic = lambda: real() + self.paused_seconds.value
            failpoint.arm(failpoints)
            try:
                deliver(engine(), [task_id])
            finally:
                os._exit(0)

    def is_killed(self) -> bool:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == -signal.SIGKILL

    def is_paused(self) -> bool:
        return os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

    def resume(self, after_seconds: float) -> int:
        """Advance the clock of the process, let it go on, and return its exit code."""
        self.paused_seconds.value = after_seconds
        os.kill(self.pid, signal.SIGCONT)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def end(self) -> None:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@contextmanager
def worker(task_id: uuid.UUID, failpoints: str) -> Iterator[Worker]:
    started = Worker(task_id, failpoints)
    try:
        yield started
    finally:
        started.end()


def reclaim_and_run(stack: ServersOfTests, task_id: uuid.UUID) -> None:
    """Let the lease expire, reclaim the task, wait for its retry, and run it here."""
    later(stack, settings.current().ingest_lease_seconds + 1)
    assert reclaim_leases(engine(), settings.current()).charged == 1
    later(stack, FIRST_RETRY_SECONDS)
    deliver(engine(), [task_id])
