"""Workers that are killed, or fall asleep past their lease, at a failpoint: forks that call the real functions."""

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
from tasks.execution.deliver import ingest
from tasks.recovery.reclaim import take_over
from tests.servers import ServersOfTests
from tests.tasks.recovery.test_reclaim import later

FIRST_WAIT_SECONDS = 60  # after a first failure


class Worker:
    """One forked process that runs one task."""

    def __init__(self, task_id: uuid.UUID, failpoints: str) -> None:
        self.slept_seconds = multiprocessing.Value("d", 0.0)
        self.pid = os.fork()
        if self.pid == 0:
            faulthandler.disable()
            real = time.monotonic
            time.monotonic = lambda: real() + self.slept_seconds.value
            failpoint.arm(failpoints)
            try:
                ingest(engine(), [task_id])
            finally:
                os._exit(0)

    def is_killed(self) -> bool:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == -signal.SIGKILL

    def is_asleep(self) -> bool:
        return os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

    def wake_up(self, after_seconds: float) -> int:
        """Its own clock has gone on meanwhile. Returns how it ended."""
        self.slept_seconds.value = after_seconds
        os.kill(self.pid, signal.SIGCONT)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def end(self) -> None:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@contextmanager
def worker(task_id: uuid.UUID, failpoints: str) -> Iterator[Worker]:
    made = Worker(task_id, failpoints)
    try:
        yield made
    finally:
        made.end()


def taken_over(stack: ServersOfTests, task_id: uuid.UUID) -> None:
    """The lease runs out, reclaim finds that, and another worker runs the task when its wait is over."""
    later(stack, settings.current().ingest_lease_seconds + 1)
    assert take_over(engine(), settings.current()).charged == 1
    later(stack, FIRST_WAIT_SECONDS)
    ingest(engine(), [task_id])
