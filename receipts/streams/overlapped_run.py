"""A run that reads while the ledger writes, for consumers whose checkpoint is the transaction of a batch.

If a batch is full, more entries are waiting. Then several batches are in work at once, in the order of the stream:

    the first     it is committed, or about to be; then its sinks tell, and its entries are acknowledged
    the others    a thread writes one after the other into the ledger
    the last      it is read and given to the handler, which prepares what the thread writes

Only one batch at a time is in a transaction, and none is begun before the one before it has committed. So entries keep
their order, and each is acknowledged after its own commit. The thread uses the ledger only, and this process waits for
it before it does anything about an error or hands over the shard.

    a write fails          the thread begins no other; the batches behind it are dropped, too, and all are read again
    the others fail        the thread is awaited; what it has committed is read again and found in the ledger
    killed                 up to four batches are not acknowledged; the next consumer reads them, in their order
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
# How many batches are handed over and not acknowledged. With two, PostgreSQL has nothing to do each time that reading
# takes a little longer than writing.
HANDED_OVER: Final = 3
# How long one thread waits for the interpreter while the other runs. With Python's 5 ms, a tenth of the time of a batch
# passes before the thread can send its next statement.
SWITCH_SECONDS: Final = 0.0002


@dataclass(slots=True)
class _Batch:
    """A batch that was given to the thread and is not acknowledged yet."""

    entries: list[Entry]
    sinks: Mapping[str, CheckpointAwareSink]
    decided: Checkpoint
    started_at: float
    write: Future[None]  # it is done when the batch is committed


class OverlappedRun(ShardRun):
    """A run whose sinks write in the transaction of a batch. Each batch has sinks of its own."""

    def __init__(self, shard: Shard, lease: ShardLease) -> None:
        super().__init__(shard, lease)
        self._thread = ThreadPoolExecutor(1, f"save {shard.stream}")
        self._batches: deque[_Batch] = deque()  # in their order
        self._has_failed = False  # a write; then the thread begins no other

    def step(self) -> None:
        """Read and write what is there; overlap that if it is much, for as long as a turn lasts."""
        if not self.collected:
            self.has_found = self.collect()
        ends_at = time.monotonic() + TURN_SECONDS
        with _two_busy_threads(), self._ending_writes():
            while (is_full := len(self.collected) >= self.asked) or (self.collected and self._batches):
                self._overlap(reads_next=is_full)
                if time.monotonic() >= ends_at:
                    return
        if self.collected:
            self.commit()

    def commit_rest(self) -> None:
        with self._ending_writes():
            if self.collected:
                self._overlap(reads_next=False)

    def end(self) -> None:
        try:
            self._end_writes()
            super().end()
        finally:
            self._thread.shutdown()

    def _overlap(self, *, reads_next: bool) -> None:
        """Hand over what was collected; meanwhile finish what is committed, and read the next batch."""
        self.lease.check()
        self._hand_over()
        if len(self._batches) == HANDED_OVER:
            self._finish_first()
        if reads_next:
            self.collect()
        while self._batches and not self.collected:
            self._finish_first()

    def _hand_over(self) -> None:
        entries, sinks = self.collected, self.sinks
        self.collected, self.sinks = [], self._new_sinks()
        for sink in sinks.values():
            sink.on_checkpoint_start(0)
        decided = Checkpoint(0, [entry.id for entry in entries])
        write = self._thread.submit(self._write, decided, [sink.write for sink in sinks.values()])
        self._batches.append(_Batch(entries, sinks, decided, time.monotonic(), write))

    def _write(self, decided: Checkpoint, writes: Sequence[checkpoint_rows.Write]) -> None:
        if self._has_failed:
            raise _NotBegun
        try:
            failpoint("checkpoint.before_row")
            checkpoint_rows.write(self.lease, decided, writes, with_row=False)
            failpoint("checkpoint.after_row")
        except BaseException:
            self._has_failed = True
            raise

    def _finish_first(self) -> None:
        """Wait for the commit of the first batch; tell what it says, and acknowledge it."""
        self._batches[0].write.result()
        batch = self._batches.popleft()
        self._finish(batch.decided, batch.sinks, batch.entries, has_row=False)
        metrics.CHECKPOINT_TOTAL.labels("committed").inc()
        metrics.CHECKPOINT_SECONDS.observe(time.monotonic() - batch.started_at)

    @contextmanager
    def _ending_writes(self) -> Iterator[None]:
        """If there is an error in the block, wait until nothing more is written."""
        try:
            yield
        except BaseException:
            self._end_writes()
            raise

    def _end_writes(self) -> None:
        """Wait for the thread. What it could not write counts as collected."""
        failed = [batch for batch in self._batches if batch.write.exception() is not None]
        self._batches.clear()
        self.collected = [entry for batch in failed for entry in batch.entries] + self.collected
        for batch in failed[:1]:
            self.sinks = {**self.sinks, **batch.sinks}

    def _new_sinks(self) -> dict[str, CheckpointAwareSink]:
        return {sink.name: sink for sink in self.shard.consumer.own_sinks(self)}


class _NotBegun(Exception):
    """A batch was not written, because the write of an earlier one has failed."""


@contextmanager
def _two_busy_threads() -> Iterator[None]:
    """Let the threads take turns quickly, and look for no cycles of objects during a turn.

    The many objects of a batch have no cycles, and looking for some takes a fifth of the processor time.
    """
    was_on, interval = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if was_on:
            gc.enable()
