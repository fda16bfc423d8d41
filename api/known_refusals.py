"""Queues that take no new tasks, as far as this process knows: for requests that must not wait for the ledger.

A request that wants a receipt `accepted` is answered while PostgreSQL is slow or down. So the ledger is asked in the
background, about once a second while such requests come, and what is not known is accepted. What was accepted is saved,
whatever the queue says by then.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

from sqlalchemy.exc import DBAPIError

from api.ledger_calls import call_ledger
from models.engine import engine
from models.errors import CeleriacError
from tasks.core.registered_types import registered_types
from tasks.core.registry import handlers
from tasks.submission.closed_queues import QueueClosed, refusals
from tasks.submission.envelope import NewTask

ASK_SECONDS: Final = 1.0
KNOWN_SECONDS: Final = 10.0  # older knowledge is no reason to refuse a task


class KnownRefusals:
    """One per event loop."""

    def __init__(self) -> None:
        self._asked_at = -KNOWN_SECONDS
        self._refusals: dict[str, QueueClosed] = {}
        self._queues: dict[str, str] = {}  # by type, as workers have registered them
        self._asking: asyncio.Task[None] | None = None

    def check(self, new: NewTask) -> None:
        """Raise QueueClosed if the task's queue is known to take no new tasks. Never waits."""
        age = time.monotonic() - self._asked_at
        if age > ASK_SECONDS and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask())
        if age < KNOWN_SECONDS and self._refusals and (refusal := self._refusals.get(self._queue_of(new))):
            raise type(refusal)(refusal.message)

    def _queue_of(self, new: NewTask) -> str:
        known = handlers().get(new.type)
        return new.queue or (known.queue if known else self._queues.get(new.type, "ingest"))

    async def _ask(self) -> None:
        asked_at = time.monotonic()
        with suppress(CeleriacError, DBAPIError):  # the next request asks again
            self._refusals, self._queues = await call_ledger(_read)
            self._asked_at = asked_at


def _read() -> tuple[dict[str, QueueClosed], dict[str, str]]:
    with engine().connect() as connection:
        found = refusals(connection)
        return found, {each.type: each.queue for each in registered_types(connection)} if found else {}
