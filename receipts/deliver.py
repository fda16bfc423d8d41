"""Deliver chat messages before they are saved, if deliver-before-saved is on.

    read       a batch of the accepted stream, in order
    push       each message to its receiver, on whichever process it is connected
    move       one script adds the messages to the stream to save, and acknowledges them

A deliverer that dies after the push delivers the same messages again: at least once, and a client drops repetitions by
serverMsgId. A message that was pushed and is rejected later is not taken back; the sender is told.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import metrics
import settings
from failpoint import failpoint
from models.guarded_session import GuardedSession
from receipts import chat_messages, frames, kinds, lua
from receipts.save import LEASE_SECONDS, Refresh, acknowledge
from receipts.streams.checkpoint_sinks import CheckpointAwareSink, Handle
from receipts.streams.consume import ShardRun, consume_together
from receipts.streams.consumers import Gate, Shard, StreamConsumer
from receipts.streams.entries import Batch, Entry
from receipts.streams.source import StreamSource

SINK = "receivers"


def deliver_any_shard(seconds: float, *, until_idle: bool = False) -> bool:
    """Deliver what is in a free shard, for some time. Return False if other deliverers have all of them."""
    numbers = list(range(settings.current().receipt_shards))
    random.shuffle(numbers)
    refresh = Refresh()
    return any(
        consume_together([shard_of(number)], seconds, until_idle=until_idle, every_second=refresh) for number in numbers
    )


def shard_of(number: int) -> Shard:
    current = settings.current()
    save, deliver = kinds.group_of(current.receipt_group_save), kinds.group_of(current.receipt_group_deliver)
    to_save = kinds.shard_key(current.receipt_stream_to_save, number)
    consumer = StreamConsumer(
        current.receipt_group_deliver,
        kinds.accepted_stream(kinds.CHAT),
        _collect,
        shards=current.receipt_shards,
        own_sinks=lambda run: [ReceiversSink(run, to_save)],
        acknowledge=lambda source, ids: acknowledge(source, ids, other_group=save, other_off="on"),
        gate=Gate(lua.GATE_DELIVER, (kinds.switches_key(), to_save), (save, deliver)),
        defers_ack=False,
        lease_seconds=LEASE_SECONDS,
    )
    return Shard.of(consumer, number)


def _collect(batch: Batch) -> None:
    batch.sink(SINK).add(batch.entries)


class ReceiversSink(CheckpointAwareSink):
    """The connected users as the sink of one shard, followed by the stream to save."""

    def __init__(self, run: ShardRun, to_save: str) -> None:
        super().__init__(SINK)
        self.run = run
        self.to_save = to_save
        self.entries: list[Entry] = []

    @property
    def writer(self) -> ReceiversSink:
        return self

    def add(self, entries: Sequence[Entry]) -> None:
        self.entries += entries

    def on_checkpoint_start(self, _checkpoint_id: int, /) -> Handle | None:
        return None

    def write(self, db: GuardedSession) -> None:
        """Write nothing: the transaction only checks that the shard is still ours."""

    def on_checkpoint_complete(self, _checkpoint_id: int, /) -> None:
        if self.entries:
            failpoint("receipts.before_push")
            self._push()
            failpoint("receipts.after_push")
            self._move()
            failpoint("receipts.after_move")
        self.entries = []

    def on_checkpoint_abort(self, _checkpoint_id: int, /) -> None:
        if self.entries:
            metrics.RECEIPT_FAILURES_TOTAL.labels("deliver").inc()
        self.entries = []

    def on_checkpoint_restore(self, _checkpoint_id: int, _handle: Handle, /) -> None:
        """Do nothing: a batch is moved, or read again."""

    def _push(self) -> None:
        pipeline = self.run.source.client.pipeline(transaction=False)
        for entry in self.entries:
            try:
                message = chat_messages.read_entry(entry)
                pushed = frames.published(message.receiver, frames.message_frame(message))
            except (KeyError, ValueError):
                continue  # the saver rejects it
            pipeline.publish(*pushed)
        self.run.source.ask(pipeline.execute)

    def _move(self) -> None:
        source: StreamSource = self.run.source
        seconds, microseconds = source.ask("time")
        at = str(seconds * 1000 + microseconds // 1000)
        values: list[Any] = []
        for entry in self.entries:
            fields = [part for pair in {**entry.fields, "deliveredAttemptTs": at}.items() for part in pair]
            values += [entry.id, len(fields), *(part.encode(errors="surrogateescape") for part in fields)]
        source.run_as_holder(lua.MOVE, [self.to_save], source.shard.group, *values)
