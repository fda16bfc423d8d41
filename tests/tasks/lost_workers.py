"""Fork workers that die at a failpoint, and reclaim their leases."""

from __future__ import annotations

import faulthandler
import os
import uuid
from collections.abc import Callable, Sequence

import failpoint
import settings
from models.engine import engine
from tasks.execution.deliver import deliver
from tasks.recovery.reclaim import Reclaimed, reclaim_leases
from tasks.recovery.tick_rows import record_tick
from tests.outbox.ledger import move
from tests.servers import ServersOfTests

LEASE = 60


def start_child(work: Callable[[], None], *, failpoints: str = "") -> int:
    """Fork a process that runs `work`, and return its pid. It exits without running any cleanup of the test."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # a segfault on purpose needs no report
        failpoint.arm(failpoints)
        try:
            work()
        finally:
            os._exit(0)
    return pid


def killed(ids: Sequence[uuid.UUID], failpoints: str) -> None:
    """Run these tasks in a worker that dies at a failpoint; assert that it did."""
    pid = start_child(lambda: deliver(engine(), ids), failpoints=failpoints)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"it did not pass {failpoints}"


def later(stack: ServersOfTests, seconds: float) -> None:
    """Move the clock, and record that reclaim has run just now; otherwise it would extend expired leases first."""
    move(stack, seconds)
    with engine().begin() as connection:
        record_tick(connection, "reclaim", holder="test")


def reclaim_lost(stack: ServersOfTests) -> Reclaimed:
    """Let every lease expire, and reclaim them."""
    later(stack, LEASE + 1)
    return reclaim_leases(engine(), settings.current())
