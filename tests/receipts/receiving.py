"""Receive messages as the API does, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import redis

import settings
from documents import accepted
from documents.accepted import Upload
from models.engine import engine, sessions
from receipts import chat_messages, kinds, task_messages
from receipts.accept import Message, Receiver
from receipts.chat_messages import ChatMessage
from receipts.log import ReceiptLog
from receipts.receipt import Receipt
from receipts.switches import Switches, read_switches
from tasks.submission.envelope import NewTask

Save = Callable[[bool], Awaitable[Receipt]]


class Receiving:
    """A receiver for one thread, and a client that looks into the receipt log."""

    def __init__(self) -> None:
        self.client: Any = redis.Redis.from_url(settings.current().redis_url, decode_responses=True)
        self._stack = ExitStack()
        self.sender = self._stack.enter_context(sender())

    def chat(self, message: ChatMessage) -> Receipt:
        message.check()
        return self.receive(message.message(), saving(chat_messages.save_now, message))

    def task(self, new: NewTask, *, principal: str = "ann", kind: str = kinds.TASKS) -> Receipt:
        message = task_messages.message_of(new, principal=principal, client_id=new.key, kind=kind)
        return self.receive(message, saving(task_messages.save_now, message, new))

    def document(self, name: str, content: bytes, *, key: str | None = None, principal: str = "ann") -> Receipt:
        given = Upload.of(principal, name, content, "text/plain", key)
        return self.receive(given.message(), saving(accepted.save_now, given))

    def receive(self, message: Message, save: Save) -> Receipt:
        return self.sender.receive(message, save)

    def reconnect(self) -> None:
        """Forget connections and checks, as a new process of the API would."""
        self._stack.close()
        self.sender = self._stack.enter_context(sender())

    def streams(self) -> dict[str, int]:
        """Return the number of entries in each stream that has any."""
        names = [kinds.accepted_stream(kind) for kind in kinds.SAVERS]
        names.append(settings.current().receipt_stream_to_save)
        lengths = {name: sum(self.client.xlen(key) for key in self.client.scan_iter(f"{name}*")) for name in names}
        return {name: length for name, length in lengths.items() if length}

    def is_empty(self) -> bool:
        return not self.streams()

    def close(self) -> None:
        self._stack.close()
        self.client.close()


class Sender:
    """A client with an event loop of its own, which keeps its connection to the receipt log."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.log = ReceiptLog()
        self.receiver = Receiver(self.log, _read_switches)

    def chat(self, message: ChatMessage) -> Receipt:
        return self.receive(message.message(), saving(chat_messages.save_now, message))

    def receive(self, message: Message, save: Save) -> Receipt:
        return self.loop.run_until_complete(self.receiver.receive(message, save))


@contextmanager
def sender() -> Iterator[Sender]:
    """Yield a client for the thread of the caller."""
    loop = asyncio.new_event_loop()
    made = Sender(loop)
    try:
        yield made
    finally:
        loop.run_until_complete(made.log.close())
        loop.close()


def saving(save: Callable[..., Receipt], *given: Any) -> Save:
    """Return the function that saves a message at once, as the API does."""

    async def saved(ordered: bool) -> Receipt:
        with sessions().begin() as session:
            return save(session, *given, ordered=ordered)

    return saved


async def _read_switches() -> Switches:
    with engine().connect() as connection:
        return read_switches(connection)
