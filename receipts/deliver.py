"""Deliver chat messages before they are saved, if deliver-before-saved is on.

    read       a batch of the accepted stream, in order
    push       each message to its receiver, on whichever process it is connected
    move       one script adds the messages to the stream to save, and acknowledges them

A deliverer that dies after the push delivers the same messages again: at least once, and a client drops repetitions by
serverMsgId. A message that was pushed and is rejected later is not taken back; the sender is told.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import settings
from failpoint import failpoint
from models.guarded_session import GuardedSession
from receipts import chat_messages, frames, kinds, lua
from receipts.shard_consumers import EntriesSink, consume_free_number, consumer
from receipts.streams.consume import ShardRun
from receipts.streams.consumers import Gate, Shard


def deliver_any_shard(seconds: float, *, until_idle: bool = False) -> bool:
    """Deliver what is in a free shard, for some time. Return False if other deliverers have all of them."""
    return consume_free_number(lambda *place: [shard_of(*place)], seconds, until_idle=until_idle)


def shard_of(number: int, shards: int | None = None) -> Shard:
    current = settings.current()
    group, accepted = current.receipt_group_deliver, kinds.accepted_stream(kinds.CHAT)
    save, deliver = kinds.group_of(current.receipt_group_save), kinds.group_of(group)
    to_save = kinds.shard_key(current.receipt_stream_to_save, number, shards)
    keys = (kinds.switches_key(), to_save)
    gate = Gate(lua.GATE_DELIVER, keys, (save, deliver), watched=kinds.switches_key())
    sink = partial(ReceiversSink, to_save)
    return Shard.of(consumer(group, accepted, sink, shards=shards, other_group=save, other_off="on", gate=gate), number)


class ReceiversSink(EntriesSink):
    """The connected users as the sink of one shard, followed by the stream to save."""

    failure = "deliver"

    def __init__(self, to_save: str, run: ShardRun) -> None:
        super().__init__(run)
        self.to_save = to_save

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

    def _push(self) -> None:
        pipeline = self.source.client.pipeline(transaction=False)
        for entry in self.entries:
            try:
                message = chat_messages.read_entry(entry)
                pushed = frames.published(message.receiver, frames.message_frame(message))
            except (KeyError, ValueError):
                continue  # the saver rejects it
            pipeline.publish(*pushed)
        self.source.ask(pipeline.execute)

    def _move(self) -> None:
        source = self.source
        seconds, microseconds = source.ask("time")
        at = str(seconds * 1000 + microseconds // 1000)
        values: list[Any] = []
        for entry in self.entries:
            fields = [part for pair in {**entry.fields, "deliveredAttemptTs": at}.items() for part in pair]
            values += [entry.id, len(fields), *(part.encode(errors="surrogateescape") for part in fields)]
        source.run_as_holder(lua.MOVE, [self.to_save], source.shard.group, *values)
