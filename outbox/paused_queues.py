"""Which queues for tasks are paused, so that their wake-ups are not published.

A wake-up of a paused queue is marked as SENT unpublished; resuming the queue wakes all tasks that are due by then
(docs/protocol.md, Pauses). The pause must be seen after the wake-up was committed, otherwise the queue may have been
resumed in between; so a pause is never remembered. That nothing is paused is remembered for a moment: if that is wrong,
the wake-up is published, and the claim refuses its tasks.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

from sqlalchemy import Connection

from models.sql import sql
from outbox.destinations import CELERY, is_wakeup

REMEMBER_SECONDS: Final = 0.5
PAUSED: Final = sql("SELECT queue FROM ledger.queue_pause WHERE NOT intake")


class PausedQueues:
    """The paused queues as one process knows them."""

    def __init__(self) -> None:
        self._none_until = 0.0

    def is_paused(self, connection: Connection, destination: str) -> bool:
        """Return whether this is the destination of wake-ups of a paused queue. Ends the transaction."""
        if not is_wakeup(destination) or time.monotonic() < self._none_until:
            return False
        read_at = time.monotonic()
        paused: Collection[str] = connection.execute(PAUSED).scalars().all()
        connection.commit()
        if not paused:
            self._none_until = read_at + REMEMBER_SECONDS
        return destination.removeprefix(CELERY) in paused
