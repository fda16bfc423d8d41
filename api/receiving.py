"""Receive messages that want a receipt: the connection of this process to the receipt log, and to the ledger.

`receipts/accept.py` decides between `accepted` and saving at once. Saving runs in a thread with a deadline, like every
call to the ledger (`ledger_calls.py`).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import settings
from api.known_refusals import KnownRefusals
from api.ledger_calls import call_ledger
from api.principals import limit_lock_time
from documents import accepted
from documents.accepted import Upload
from documents.store import TYPE as DOCUMENT_TYPE
from models.engine import engine, sessions
from models.errors import CeleriacError
from receipts import chat_messages, status, task_messages
from receipts.accept import Message, Receiver
from receipts.chat_messages import ChatMessage
from receipts.log import ReceiptLog
from receipts.receipt import Receipt
from receipts.signing import sign
from receipts.status import InLedger
from receipts.switches import Switches, read_switches
from tasks.submission.envelope import NewTask

SWITCH_SECONDS: Final = 1.0  # how old the switches may be that are used while Redis is unreachable
LESS_SECONDS: Final = 1.0  # that reading them may take, because the request has already waited for Redis


class Receiving:
    """One per event loop."""

    def __init__(self) -> None:
        self.log = ReceiptLog()
        self.receiver = Receiver(self.log, self._read_switches)
        self.refusals = KnownRefusals()
        self._switches: tuple[float, Switches] | None = None

    async def chat(self, message: ChatMessage) -> Receipt:
        """Receive a chat message that was checked."""

        async def save(ordered: bool) -> Receipt:
            return await call_ledger(lambda: _in_transaction(chat_messages.save_now, message, ordered=ordered))

        return await self.receiver.receive(message.message(), save)

    async def task(self, message: Message, new: NewTask) -> Receipt:
        """Receive a task; `message` was made of it (`task_messages.message_of`)."""

        async def save(ordered: bool) -> Receipt:
            return await self.save_task(message, new, ordered=ordered)

        self.refusals.check(new)
        return await self.receiver.receive(message, save)

    async def save_task(self, message: Message, new: NewTask, *, ordered: bool) -> Receipt:
        """Save a task without the receipt log."""
        return await call_ledger(lambda: _in_transaction(task_messages.save_now, message, new, ordered=ordered))

    async def document(self, given: Upload) -> Receipt:
        """Receive an upload."""

        async def save(ordered: bool) -> Receipt:
            return await self.save_document(given, ordered=ordered)

        self.refusals.check(NewTask(DOCUMENT_TYPE))
        return await self.receiver.receive(given.message(), save)

    async def save_document(self, given: Upload, *, ordered: bool) -> Receipt:
        """Save an upload without the receipt log."""
        return await call_ledger(lambda: _in_transaction(accepted.save_now, given, ordered=ordered))

    async def find(self, id_: uuid.UUID) -> Receipt:
        """Return how far a message is (`receipts/status.py`). What Redis took is taken from the time of the ledger."""
        began_at = time.monotonic()

        async def read_ledger(id_: uuid.UUID) -> InLedger:
            return await call_ledger(lambda: status.read_ledger(id_), more_seconds=began_at - time.monotonic())

        return await status.find_receipt(self.log, read_ledger, id_)

    async def _read_switches(self) -> Switches:
        now = time.monotonic()
        if self._switches is None or now - self._switches[0] > SWITCH_SECONDS:
            self._switches = (now, await call_ledger(_read_switches, more_seconds=-LESS_SECONDS))
        return self._switches[1]


_by_loop: dict[asyncio.AbstractEventLoop, Receiving] = {}


def receiving() -> Receiving:
    """Return the one of this event loop. Its settings do not change while it runs."""
    loop = asyncio.get_running_loop()
    if loop not in _by_loop:
        _by_loop[loop] = Receiving()
    return _by_loop[loop]


async def check_log() -> None:
    """Check the receipt log when the process starts, if it is needed. What is wrong is logged."""
    if settings.current().receipt_two_phase_enabled:
        with suppress(CeleriacError):
            await receiving().log.require_durable()


async def close() -> None:
    """Close the connections of this event loop, if there are any."""
    made = _by_loop.pop(asyncio.get_running_loop(), None)
    if made is not None:
        await made.log.close()


def signed(receipt: Receipt) -> dict[str, Any]:
    """Return the receipt as JSON objects show it, with its signature."""
    return sign(receipt.fields())


def _in_transaction(save: Callable[..., Receipt], *given: Any, **options: Any) -> Receipt:
    with sessions().begin() as session:
        limit_lock_time(session)
        return save(session, *given, **options)


def _read_switches() -> Switches:
    with engine().connect() as connection:
        return read_switches(connection)
