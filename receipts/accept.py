"""Accept a message: claim its id and write it to the receipt log, in one script. The reply is the receipt.

    new id                       `accepted`: the message is on the disk of the receipt log
    known id, same payload       the receipt that it has, with `duplicate`: accepted or saved
    known id, other payload      IdempotencyConflict
    two-phase is switched off    None: the caller saves the message in the ledger itself and answers `saved`. While
                                 earlier messages of the same shard are still in the stream, it waits for them, so a
                                 sender's messages stay in order when two-phase is switched off under load
    too much is waiting          ReceiptsFull
    Redis down or not durable    ReceiptLogUnreachable, NotDurable: nothing was written; `receive` decides what then

A claim has no expiry until its message is saved or rejected, and RECEIPT_CLAIM_SECONDS afterwards. Ids are computed
from the id of the client (`tasks/core/task_ids.py`), so the ledger recognises a repetition also without the claim.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import metrics
import settings
from failpoint import failpoint
from models.receipts import Level
from receipts import kinds, lua
from receipts.errors import (
    EnvelopeTooLarge,
    ReceiptLogUnreachable,
    ReceiptsFull,
    ServerBusy,
)
from receipts.log import ReceiptLog
from receipts.receipt import Receipt, from_milliseconds
from receipts.switches import Switches
from tasks.submission.submit import IdempotencyConflict

DRAIN_SECONDS: Final = 5.0
DRAIN_PAUSE_SECONDS: Final = 0.02
MEMORY_FULL: Final = "The receipt log has used up nearly all of its memory; try again later."


@dataclass(frozen=True, slots=True)
class Message:
    """A message to accept. `fields` are those of its entry; `sender` decides about the shard."""

    kind: str
    id: uuid.UUID
    sender: str
    sha256: str
    fields: Mapping[str, str | bytes]
    client_id: str | None = None


@dataclass(slots=True)
class Receiver:
    """Receives messages for one process: accepts them, or lets the caller save them."""

    log: ReceiptLog
    read_switches: Callable[[], Awaitable[Switches]]  # from the ledger; only asked while Redis is unreachable

    async def receive(self, message: Message, save: Callable[[bool], Awaitable[Receipt]]) -> Receipt:
        """Return the receipt of a message: `accepted`, or what `save(ordered)` returns if it must be saved at once.

        If the receipt log is unreachable, RECEIPT_FAIL_OPEN decides between saving at once and ServerBusy. A receipt
        that was saved then says `ordered: false`: earlier messages of the sender may still be in the log.
        """
        try:
            accepted = await self.accept(message)
        except ReceiptLogUnreachable as error:
            metrics.RECEIPT_FAILURES_TOTAL.labels("publish").inc()
            switches = await self.read_switches()
            if switches.two_phase and not switches.fail_open:
                raise ServerBusy from error
            return await save(not switches.was_two_phase)
        return await save(True) if accepted is None else accepted

    async def accept(self, message: Message) -> Receipt | None:
        """Return the receipt, or None if the message must be saved at once."""
        began_at = time.monotonic()
        _require_size(message)
        await self.log.require_durable()
        answer = await self._run(message)
        failpoint("receipts.after_accept")
        if answer[0] == "draining":
            answer = await self._await_drained(message)
        match answer:
            case ["save"]:
                return None
            case ["conflict"]:
                raise IdempotencyConflict(message.id)
            case ["full"]:
                raise ReceiptsFull(MEMORY_FULL if self.log.is_full else None)
            case ["accepted", at, promise]:
                metrics.RECEIPT_ACCEPT_SECONDS.observe(time.monotonic() - began_at)
                metrics.RECEIPTS_TOTAL.labels(Level.ACCEPTED.value).inc()
                return _receipt(message, Level.ACCEPTED, at, promise)
            case ["known", level, at, promise, seq, saved_at]:
                known = replace(_receipt(message, Level(level), at, promise), duplicate=True)
                if not saved_at:
                    return known
                return replace(known, ledger_seq=int(seq), saved_at=from_milliseconds(saved_at))
        raise AssertionError(f"The script answered {answer!r}.")

    async def _await_drained(self, message: Message) -> Any:
        """Wait until earlier messages of the shard are saved. If that takes too long, the ledger is probably down."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_PAUSE_SECONDS)
            answer = await self._run(message)
            if answer[0] != "draining":
                return answer
        raise ReceiptsFull("Two-phase receipts were switched off, and earlier messages are not saved yet; try again.")

    async def _run(self, message: Message) -> Any:
        current = settings.current()
        stream = kinds.accepted_stream(message.kind)
        shard = kinds.shard_of(message.sender)
        key = kinds.shard_key(stream, shard)
        to_save = kinds.shard_key(current.receipt_stream_to_save, shard) if message.kind == kinds.CHAT else key
        pairs = [part for pair in message.fields.items() for part in pair]
        return await self.log.run(
            lua.ACCEPT,
            [kinds.claim_key(message.id), key, kinds.switches_key(), to_save],
            [
                message.sha256,
                "on" if current.receipt_two_phase_enabled else "off",
                0 if self.log.is_full else current.receipt_stream_limit,
                round(current.receipt_promise_seconds * 1000),
                message.kind,
                message.sender,
                "" if message.client_id is None else message.client_id,
                kinds.group_of(current.receipt_group_save),
                kinds.group_of(current.receipt_group_deliver),
                *pairs,
            ],
        )


def _require_size(message: Message) -> None:
    size = sum(len(value) if isinstance(value, bytes) else len(value.encode()) for value in message.fields.values())
    if size > (limit := settings.current().receipt_max_bytes):
        raise EnvelopeTooLarge(f"The message has {size:,} bytes; a receipt `accepted` allows {limit:,}.")


def _receipt(message: Message, level: Level, at: str, promise: str) -> Receipt:
    return Receipt(
        level,
        message.id,
        message.kind,
        message.sender,
        message.sha256,
        from_milliseconds(at),
        from_milliseconds(promise),
        message.client_id,
    )
