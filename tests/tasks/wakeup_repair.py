"""Send lost wake-ups again, in tests."""

from __future__ import annotations

from collections.abc import Iterable

import settings
from models.engine import engine
from outbox.after_commit_publisher import after_commit_publisher
from tasks import broker
from tasks.recovery.lost_wakeups import repair


def repair_lost_wakeups(*, depth: int | None = 0) -> int:
    """Send lost wake-ups again as if every queue had `depth` messages; with None, ask the broker.

    Wake-ups that were handed over to the publishing thread must be out of the outbox before: an unpublished wake-up is
    not lost, and how fast the thread is depends on the machine.
    """

    def given(queues: Iterable[str]) -> dict[str, int]:
        return dict.fromkeys(queues, depth or 0)

    assert after_commit_publisher().wait_until_idle(20)
    woken = repair(engine(), settings.current(), depths=broker.depths if depth is None else given)
    assert after_commit_publisher().wait_until_idle(20)
    return woken
