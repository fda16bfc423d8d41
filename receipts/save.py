"""Save accepted messages: read them from the streams in batches, write them into the ledger, and tell the sender.

    read       a batch of one shard, in order (`streams/source.py`)
    save       one transaction that holds the shard: messages, and their receipts (`save_batch.py`)
    tell       the claim in Redis says `saved` or `rejected`, and frames go to users who are connected
    XACK       the entries are acknowledged, and deleted when every group has passed them

    died before the commit    the next saver reads the same entries
    died after the commit     the next saver reads them, finds the messages in the ledger, and tells again
    the shard was lost        the transaction finds another token and writes nothing
    the ledger is down        the entries wait; `accept` goes on until a stream has RECEIPT_STREAM_LIMIT entries

One saver serves one shard number of every kind, so RECEIPT_SHARDS is the number of savers that work at once. For chats
it reads the accepted stream, or the stream to save, according to deliver-before-saved; conditions on reading
(`lua.py`) keep the order of each sender when that is switched.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import metrics
import settings
from failpoint import failpoint
from models.guarded_session import GuardedSession
from models.receipts import Level
from receipts import chat_messages, frames, kinds, lua
from receipts.receipt import milliseconds
from receipts.save_batch import ReadBatch, Settled, read_batch, save_batch
from receipts.shard_consumers import EntriesSink, consume_free_number, consumer
from receipts.streams.consume import ShardRun
from receipts.streams.consumers import Gate, Shard, StreamConsumer
from receipts.streams.entries import Entry
from receipts.streams.overlapped_run import OverlappedRun

logger = logging.getLogger(__name__)


def save_any_shard(seconds: float, *, until_idle: bool = False) -> bool:
    """Save what is in the shards of a free number, for some time. Return False if other savers have all of them."""
    return consume_free_number(shards_of, seconds, until_idle=until_idle)


def shards_of(number: int, shards: int | None = None) -> list[Shard]:
    """Return the shards with this number, of all streams that a saver reads. `shards`: as in `kinds.shard_key`."""
    return [Shard.of(each, number) for each in consumers(number, shards)]


def consumers(number: int, shards: int | None = None) -> list[StreamConsumer]:
    """Return the savers of all streams; the gate of the chats is that of one shard number."""
    current = settings.current()
    group, to_save = current.receipt_group_save, current.receipt_stream_to_save
    save, deliver = kinds.group_of(group), kinds.group_of(current.receipt_group_deliver)
    keys = (kinds.switches_key(), kinds.shard_key(to_save, number, shards))
    gate = Gate(lua.GATE_SAVE_ACCEPTED, keys, (save, deliver), watched=kinds.switches_key())
    accepted = kinds.accepted_stream(kinds.CHAT)
    chats = partial(SavingSink, kinds.CHAT)
    saver = partial(consumer, group, shards=shards, make_run=OverlappedRun)
    made = [
        saver(accepted, chats, other_group=deliver, other_off="off", gate=gate),
        saver(to_save, partial(chats, is_delivered=True)),
    ]
    for kind in kinds.SAVERS:
        if kind != kinds.CHAT:
            made.append(saver(kinds.accepted_stream(kind), partial(SavingSink, kind)))
    return made


class SavingSink(EntriesSink):
    """The ledger as the sink of one shard: a batch is written by the transaction that decides its checkpoint."""

    failure = "save"

    def __init__(self, kind: str, run: ShardRun, *, is_delivered: bool = False) -> None:
        super().__init__(run)
        self.kind = kind
        self.is_delivered = is_delivered  # the receiver got the message before it was saved
        self.read: ReadBatch | None = None  # what the entries say, if all of them can be read
        self.results: list[Settled] = []

    def add(self, entries: Sequence[Entry]) -> None:
        super().add(entries)
        self.read = read_batch(self.kind, self.entries)

    def write(self, db: GuardedSession) -> None:
        failpoint("receipts.before_save")
        self.results = save_batch(db, self.kind, self.entries, self.read)

    def on_checkpoint_complete(self, _checkpoint_id: int, /) -> None:
        failpoint("receipts.after_save")
        if self.results:
            self._tell()
            _count(self.results)
        self.entries, self.results = [], []

    def _tell(self) -> None:
        """Update the claims, and publish frames for the users of chats."""
        claims: dict[tuple[Any, ...], list[Settled]] = defaultdict(list)
        for each in self.results:
            claims[_group_of(each)].append(each)
        script = self.source.client.register_script(lua.SETTLE)
        for number, (common, settled) in enumerate(claims.items(), 1):
            keys = [kinds.claim_key(each.row.id) for each in settled]
            values = [settings.current().receipt_claim_seconds, *common]
            for each in settled:
                values += (each.row.sha256, each.saved.seq, str(each.saved.task_id or ""))
            if number == len(claims):
                values += self._pushes()
            self.source.ask(script, keys=keys, args=values)

    def _pushes(self) -> list[bytes]:
        if self.kind != kinds.CHAT:
            return []
        return [part for each in self.results for part in _pushes(each, is_delivered=self.is_delivered)]


def _group_of(settled: Settled) -> tuple[Any, ...]:
    """Return what the script `SETTLE` writes into the claims of all messages that were saved together."""
    rejected = settled.rejected
    code, reason = (rejected.code, rejected.reason) if rejected else ("", "")
    return settled.level.value, milliseconds(settled.saved.saved_at), code, reason


def _pushes(settled: Settled, *, is_delivered: bool) -> list[bytes]:
    """Return pairs of a channel and a frame: the receipt for the sender, and the message for the receiver."""
    try:
        message = settled.given.message if settled.given else chat_messages.read_entry(settled.entry)
        pairs = frames.published(message.sender, frames.receipt_frame(message, settled.receipt))
        if settled.level is Level.SAVED and not is_delivered:
            pairs += frames.published(message.receiver, frames.message_frame(message))
    except (KeyError, ValueError):
        return []  # the entry was rejected, and does not say who sent it, or not as text
    return pairs


def _count(results: Sequence[Settled]) -> None:
    new = [each for each in results if each.is_new]
    metrics.RECEIPT_FAILURES_TOTAL.labels("duplicate").inc(len(results) - len(new))
    for level, count in Counter(each.level for each in new).items():
        metrics.RECEIPTS_TOTAL.labels(level.value).inc(count)
    lags = [
        max(0.0, (each.saved.saved_at - each.row.accepted_at).total_seconds()) if each.row.accepted_at else 0.0
        for each in new
    ]
    metrics.observe_many(metrics.RECEIPT_SAVE_LAG_SECONDS, lags)
    if late := sum(lag > settings.current().receipt_promise_seconds for lag in lags):
        metrics.RECEIPT_PROMISES_MISSED_TOTAL.inc(late)
        fields = {"event": "receipt_promise_missed", "count": late}
        logger.error("%d messages were saved later than promised.", late, extra=fields)
