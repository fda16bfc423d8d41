"""Make a backlog of accepted messages large enough to measure how fast it drains.

The rate of HTTP requests depends on the machine, and a backlog of a few batches leaves a saver little to overlap. So
what the load has not sent is accepted by the code that the API calls for a request, without HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NoReturn

from bench.receipt_load import TEXT, Target
from models.receipts import Level
from receipts import task_messages
from receipts.accept import Message, Receiver
from receipts.log import ReceiptLog
from receipts.receipt import Receipt
from tasks.submission.envelope import NewTask

AT_ONCE: Final = 64


def accept_messages(target: Target, count: int) -> list[str]:
    """Accept so many tasks, and return the ids of their receipts."""
    return asyncio.run(_accept(target, count))


async def _accept(target: Target, count: int) -> list[str]:
    log = ReceiptLog()
    receiver = Receiver(log, _ledger_is_not_asked)
    try:
        ids: list[str] = []
        for start in range(0, count, AT_ONCE):
            numbers = [next(target.numbers) for _ in range(min(AT_ONCE, count - start))]
            receipts = await asyncio.gather(*(receiver.accept(task_message(number)) for number in numbers))
            ids += _accepted_ids(receipts)
        return ids
    finally:
        await log.close()


def task_message(number: int) -> Message:
    """Return the message for a request of `receipt_load.py`."""
    new = NewTask("bench.task", {"n": number, "text": TEXT}, context={"principal": "bench"})
    return task_messages.message_of(new, principal="bench", client_id=None)


def _accepted_ids(receipts: Sequence[Receipt | None]) -> list[str]:
    return [str(each.id) for each in receipts if each is not None and each.level is Level.ACCEPTED]


async def _ledger_is_not_asked() -> NoReturn:
    raise AssertionError("Only `receive` asks for the switches.")
