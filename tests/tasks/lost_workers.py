"""Workers that die on purpose: forked children of a test, which end at a failpoint, and what is left of them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence

import failpoint
import settings
from models.engine import engine
from tasks.execution.deliver import ingest
from tasks.recovery.reclaim import Reclaimed, take_over
from tasks.recovery.tick_rows import record_tick
from tests.outbox.ledger import move
from tests.servers import ServersOfTests

LEASE = 60


def start_child(work: Callable[[], None], *, failpoints: str = "") -> int:
    """Its pid. It ends without a word, however that is."""
    pid = os.fork()
    if pid == 0:
        failpoint.arm(failpoints)
        try:
            work()
        finally:
            os._exit(0)
    return pid


def killed(ids: Sequence[uuid.UUID], failpoints: str) -> None:
    """A worker that gets these tasks and dies at a failpoint; anything else is an error of the test."""
    pid = start_child(lambda: ingest(engine(), ids), failpoints=failpoints)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"it did not pass {failpoints}"


def later(stack: ServersOfTests, seconds: float) -> None:
    """Time passes, and somebody has looked just now."""
    move(stack, seconds)
    with engine().begin() as connection:
        record_tick(connection, "reclaim", holder="test")


def taken_over(stack: ServersOfTests) -> Reclaimed:
    """What the lost have left, a lease later."""
    later(stack, LEASE + 1)
    return take_over(engine(), settings.current())
