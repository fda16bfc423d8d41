"""What savers and deliverers share: they hold shards, collect batches, and acknowledge what they have finished."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final, Self

import metrics
import settings
from models.engine import autocommit, engine
from receipts import kinds, lua, switches
from receipts.left_over_shards import left_over_shards
from receipts.log_client import connect, translated
from receipts.streams.checkpoint_sinks import CheckpointAwareSink, Handle
from receipts.streams.consume import ShardRun, consume_together
from receipts.streams.consumers import Gate, Shard, StreamConsumer
from receipts.streams.entries import Batch, Entry
from receipts.streams.shard_lease import ShardLease
from receipts.streams.source import StreamSource

logger = logging.getLogger(__name__)

LEASE_SECONDS: Final = 10.0  # after which another process takes over from one that was killed
LEFT_OVER_SECONDS: Final = 5.0  # how long a shard is held while some are left over, so that all have their turn
SINK: Final = "receipts"


def consume_free_number(
    shards_of: Callable[[int, int], Sequence[Shard]], seconds: float, *, until_idle: bool = False
) -> bool:
    """Consume the shards of a free number, for some time. Return False if other processes have all of them.

    `shards_of` is given a number, and how many shards there are. Shards of an earlier RECEIPT_SHARDS that still have
    entries take turns with those of today.
    """
    shards = settings.current().receipt_shards
    places = [(number, shards) for number in range(shards)]
    with closing(connect()) as client:
        with translated():
            left_over = {(each.number, each.shards) for each in left_over_shards(client)}
        if left_over:
            places += left_over
            seconds = min(seconds, LEFT_OVER_SECONDS)
        random.shuffle(places)
        copy = partial(copy_switches, client)
        return any(
            consume_together(shards_of(*place), seconds, until_idle=until_idle, every_second=copy) for place in places
        )


def consumer(
    group: str,
    stream: str,
    sink: Callable[[ShardRun], EntriesSink],
    *,
    shards: int | None = None,
    other_group: str = "",
    other_off: str = "",
    gate: Gate | None = None,
    make_run: Callable[[Shard, ShardLease], ShardRun] | None = None,
) -> StreamConsumer:
    """Return a consumer that gives its batches to a sink.

    `shards`: as in `kinds.shard_key`. `other_group` is our other group on the stream. It is switched off while
    `delivering` has the value `other_off`.
    """

    def acknowledge(source: StreamSource, ids: Sequence[str]) -> int:
        """Acknowledge entries, and delete what every group has passed."""
        values = (source.shard.group, other_group, other_off, *ids)
        return int(source.run_as_holder(lua.ACKNOWLEDGE, [kinds.switches_key()], *values))

    return StreamConsumer(
        group,
        stream,
        _collect,
        shards=shards or settings.current().receipt_shards,
        own_sinks=lambda run: [sink(run)],
        acknowledge=acknowledge,
        gate=gate,
        defers_ack=False,  # the transaction of a batch is its checkpoint
        lease_seconds=LEASE_SECONDS,
        make_run=make_run,
    )


class EntriesSink(CheckpointAwareSink):
    """A sink that collects the entries of a batch. A batch is finished and acknowledged, or read again."""

    failure: str  # the label of a batch that was aborted, in celeriac_receipt_failures_total

    def __init__(self, run: ShardRun) -> None:
        super().__init__(SINK)
        self.source: StreamSource = run.source
        self.entries: list[Entry] = []

    @property
    def writer(self) -> Self:
        return self

    def add(self, entries: Sequence[Entry]) -> None:
        self.entries += entries

    def on_checkpoint_start(self, _checkpoint_id: int, /) -> Handle | None:
        return None

    def on_checkpoint_abort(self, _checkpoint_id: int, /) -> None:
        if self.entries:
            metrics.RECEIPT_FAILURES_TOTAL.labels(self.failure).inc()
        self.entries = []

    def on_checkpoint_restore(self, _checkpoint_id: int, _handle: Handle, /) -> None:
        """Do nothing: without a handle there is nothing to restore."""


def _collect(batch: Batch) -> None:
    batch.sink(SINK).add(batch.entries)


def copy_switches(client: Any) -> None:
    """Copy the switches of the ledger to Redis, so that a change takes effect within a second or two."""
    with autocommit(engine()) as connection:
        found = switches.read_switches(connection)
    with translated():
        is_switched = switches.copy_to_log(client, found)
    if is_switched:
        word = "delivered before they are saved" if found.deliver_before_saved else "saved before delivery"
        logger.warning("From now on, messages are %s.", word, extra={"event": "receipt_delivery_switched"})
