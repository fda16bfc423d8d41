"""A run that reads while the ledger writes, for consumers whose checkpoint is the transaction of a batch.

If a batch is full, more entries are waiting. Then three batches are in work at once:

    one before    it is committed: its sinks tell, and its entries are acknowledged
    this one      a thread writes it into the ledger
    next one      it is read and given to the handler

Only one batch at a time is in a transaction, and none is begun before the one before it has committed. So entries keep
their order, and each is acknowledged after its own commit. The thread uses the ledger only, and this process waits for
it before it does anything about an error or hands over the shard.

    the write fails        the next batch is dropped, too; both are read again
    the others fail        the write is awaited; if it has committed, its entries are read again and found in the ledger
    killed                 up to three batches are not acknowledged; the next consumer reads them, in their order
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import metrics
from failpoint import failpoint
from receipts.streams import checkpoint_rows
from receipts.streams.checkpoint_rows import Checkpoint
from receipts.streams.checkpoint_sinks import CheckpointAwareSink
from receipts.streams.consume import ShardRun
from receipts.streams.consumers import Shard
from receipts.streams.entries import Entry
from receipts.streams.shard_lease import ShardLease

# How long a backlog is written before the other shards of this process have their turn. Asking them after each batch
# would cost a tenth of the time in which PostgreSQL has nothing to do.
TURN_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that is being written, or is committed and not acknowledged yet."""

    entries: list[Entry]
    sinks: Mapping[str, CheckpointAwareSink]
    decided: Checkpoint
    started_at: float

    @classmethod
    def of(cls, entries: list[Entry], sinks: Mapping[str, CheckpointAwareSink]) -> _Batch:
        for sink in sinks.values():
            sink.on_checkpoint_start(0)
        return cls(entries, sinks, Checkpoint(0, [entry.id for entry in entries]), time.monotonic())


class OverlappedRun(ShardRun):
    """A run whose sinks write in the transaction of a batch. Each batch has sinks of its own."""

    def __init__(self, shard: Shard, lease: ShardLease) -> None:
        super().__init__(shard, lease)
        self._thread = ThreadPoolExecutor(1, f"save {shard.stream}")
        self._committed: _Batch | None = None  # it is not acknowledged yet

    def step(self) -> None:
        """Read and write what is there; overlap that if it is much, for as long as a turn lasts."""
        if not self.collected:
            self.has_found = self.collect()
        ends_at = time.monotonic() + TURN_SECONDS
        with _without_collections():
            while (is_full := len(self.collected) >= self.asked) or (self.collected and self._committed):
                self._overlap(reads_next=is_full)
                if time.monotonic() >= ends_at:
                    return
        if self.collected:
            self.commit()

    def commit_rest(self) -> None:
        if self.collected:
            self._overlap(reads_next=False)

    def end(self) -> None:
        try:
            super().end()
        finally:
            self._thread.shutdown()

    def _overlap(self, *, reads_next: bool) -> None:
        """Write what was collected; meanwhile finish the batch before, and read the next one."""
        self.lease.check()
        batch = _Batch.of(self.collected, self.sinks)
        self.collected, self.sinks = [], self._new_sinks()
        with self._writing(batch):
            self._finish_committed()
            if reads_next:
                self.collect()
        self._committed = batch
        if not self.collected:
            self._finish_committed()

    @contextmanager
    def _writing(self, batch: _Batch) -> Iterator[None]:
        """Write a batch in the thread; at the end of the block, wait for its commit."""
        writing = self._thread.submit(self._write, batch)
        try:
            yield
        finally:
            if (error := writing.exception()) is not None:
                self.collected = batch.entries + self.collected
                self.sinks = {**self.sinks, **batch.sinks}
                raise error

    def _write(self, batch: _Batch) -> None:
        failpoint("checkpoint.before_row")
        checkpoint_rows.write(self.lease, batch.decided, _writes(batch), with_row=False)
        failpoint("checkpoint.after_row")

    def _finish_committed(self) -> None:
        if self._committed is None:
            return
        batch, self._committed = self._committed, None
        self._finish(batch.decided, batch.sinks, batch.entries, has_row=False)
        metrics.CHECKPOINT_TOTAL.labels("committed").inc()
        metrics.CHECKPOINT_SECONDS.observe(time.monotonic() - batch.started_at)

    def _new_sinks(self) -> dict[str, CheckpointAwareSink]:
        return {sink.name: sink for sink in self.shard.consumer.own_sinks(self)}


@contextmanager
def _without_collections() -> Iterator[None]:
    """Look for no cycles of objects during a turn: the many objects of a batch have none, and looking takes longer."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _writes(batch: _Batch) -> Sequence[checkpoint_rows.Write]:
    return [sink.write for sink in batch.sinks.values()]
