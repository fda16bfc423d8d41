"""Receive messages as the API does, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis

import settings
from models.engine import engine, sessions
from receipts import chat_messages, kinds, task_messages
from receipts.accept import Message, Receiver
from receipts.chat_messages import ChatMessage
from receipts.log import ReceiptLog
from receipts.receipt import Receipt
from receipts.switches import Switches, read_switches
from tasks.submission.envelope import NewTask

T = TypeVar("T")


class Receiving:
    """A receiver, and a client that looks into the receipt log."""

    def __init__(self) -> None:
        self.client: Any = redis.Redis.from_url(settings.current().redis_url, decode_responses=True)

    def chat(self, message: ChatMessage) -> Receipt:
        message.check()

        async def save(ordered: bool) -> Receipt:
            with sessions().begin() as session:
                return chat_messages.save_now(session, message, ordered=ordered)

        return self.receive(message.message(), save)

    def task(self, new: NewTask, *, principal: str = "ann", kind: str = kinds.TASKS) -> Receipt:
        message = task_messages.message_of(new, principal=principal, client_id=new.key, kind=kind)

        async def save(ordered: bool) -> Receipt:
            with sessions().begin() as session:
                return task_messages.save_now(session, message, new, ordered=ordered)

        return self.receive(message, save)

    def receive(self, message: Message, save: Callable[[bool], Awaitable[Receipt]]) -> Receipt:
        async def run() -> Receipt:
            log = ReceiptLog()
            try:
                return await Receiver(log, _read_switches).receive(message, save)
            finally:
                await log.close()

        return asyncio.run(run())

    def streams(self) -> dict[str, int]:
        """Return the number of entries in each stream that has any."""
        names = [kinds.accepted_stream(kind) for kind in kinds.SAVERS]
        names.append(settings.current().receipt_stream_to_save)
        lengths = {name: sum(self.client.xlen(key) for key in self.client.scan_iter(f"{name}*")) for name in names}
        return {name: length for name, length in lengths.items() if length}

    def is_empty(self) -> bool:
        return not self.streams()

    def close(self) -> None:
        self.client.close()


async def _read_switches() -> Switches:
    with engine().connect() as connection:
        return read_switches(connection)
