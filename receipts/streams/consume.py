"""Consume a Redis Stream so that the effect of each entry happens once, whatever dies.

The ledger decides: a checkpoint is one row, with the entries it covers, the state of the handler, and what every sink
needs to commit. With CHECKPOINT_DEFER_ACK, a consumer does this for its shard, again and again:

    read      old unacknowledged entries first, then new ones (`source.py`)
    handle    the handler writes to sinks; no one else sees that (`checkpoint_sinks.py`)
    prepare   sinks get ready to commit
    decide    the row of the checkpoint, in a transaction that checks the token of the shard (`checkpoint_rows.py`)
    commit    sinks make their effects visible
    mark      the row says `sink_committed`
    XACK      the entries are acknowledged, never before the sinks have committed

    died before the decision       the effects are aborted; the next consumer reads the entries again
    died after the decision        the next consumer commits from the row, then acknowledges
    died after the mark            the next consumer acknowledges
    the shard was lost             the transaction of the decision finds another token and writes nothing

An error before the decision aborts the checkpoint; one after it leaves the checkpoint to the next run. Both end the
run, and beat starts the next one. So a handler that fails for an entry stops its shard until it succeeds; entries keep
their order and none is skipped.

Without CHECKPOINT_DEFER_ACK the same happens for each batch, but without the row: after a crash the entries of a batch
are handled again, so effects happen at least once; once, if the sink has keys or is a script.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, Final

import metrics
import settings
from failpoint import failpoint
from models.engine import engine
from models.errors import LeaseLost
from receipts.streams import checkpoint_rows
from receipts.streams.checkpoint_rows import Checkpoint
from receipts.streams.checkpoint_sinks import CheckpointAwareSink, OpenCheckpoint
from receipts.streams.consumers import Shard, all_shards
from receipts.streams.entries import Batch, Entry
from receipts.streams.fault_events import FaultEvent, log_event
from receipts.streams.participants import participant
from receipts.streams.repeats import Repeats
from receipts.streams.shard_lease import ShardLease
from receipts.streams.source import StreamSource, wait_for_any
from sinks.contract import UnknownSink
from tasks.execution.worker_end import worker_ends

BATCH_CHARACTERS: Final = 16_000_000
FIRST_ENTRY_CHARACTERS: Final = 100_000.0  # what the entries of the first batch are assumed to have
LARGEST_CHECKPOINT: Final = 2000  # entries; what they write to Redis lists is stored in one row of the ledger


def consume_any_shard(seconds: float) -> bool:
    """Consume a shard that no other consumer holds, for some time. Return False if there is none."""
    shards = list(all_shards())
    random.shuffle(shards)  # if there are more shards than consumers, each has its turn
    return any(consume(shard, seconds) for shard in shards)


def consume(shard: Shard, seconds: float, *, until_idle: bool = False) -> bool:
    """Hold a shard and consume it for some time. Return False if another consumer holds it."""
    return consume_together([shard], seconds, until_idle=until_idle)


def consume_together(
    shards: Sequence[Shard],
    seconds: float,
    *,
    until_idle: bool = False,
    every_second: Callable[[], object] = lambda: None,
) -> bool:
    """Hold those of the shards that are free and consume them in turn, for some time. Return False if none is free.

    It ends early if the worker of this process is about to end.
    The others are held as soon as they become free: after a crash their leases expire one after the other.
    An error ends the run of its shard only. The shard is tried again after a second, so that a short outage does not
    leave it without a consumer as long as the others have one; the error of a last attempt is raised at the end.
    """
    runs: list[ShardRun] = []
    ends_at, called_at = time.monotonic() + seconds, 0.0
    try:
        runs += _hold_free(shards)
        if not runs:
            return False
        every_second()
        going = [run for run in runs if run.goes_on(run.begin)]
        while going and (now := time.monotonic()) < ends_at and not worker_ends():
            if now - called_at >= 1:
                every_second()
                called_at = now
                going += _begin_others(shards, runs, going)
            found = False
            for run in list(going):
                if not run.goes_on(run.step):
                    going.remove(run)
                found = found or run.has_found
            if not found and until_idle:
                break
            if not found and going:
                waits = min(run.wait_seconds(time.monotonic(), ends_at) for run in going)
                if waits > 0:
                    wait_for_any([run.source for run in going], waits)
        for run in going:
            run.goes_on(run.commit_rest)
    finally:
        _end_all(runs)
    for failure in (run.failure for run in runs if run.failure):
        raise failure
    return True


def _hold_free(shards: Sequence[Shard]) -> Iterator[ShardRun]:
    for shard in shards:
        lease = ShardLease.take(engine(), shard, seconds=shard.lease_seconds)
        if lease is not None:
            try:
                yield (shard.consumer.make_run or ShardRun)(shard, lease)
            except BaseException:
                lease.release()
                raise


def _begin_others(shards: Sequence[Shard], runs: list[ShardRun], going: Sequence[ShardRun]) -> list[ShardRun]:
    """Hold shards that are not consumed, because they were not free or their run has failed.

    Add their runs to `runs`, and return those that have begun.
    """
    for run in [run for run in runs if run not in going]:
        runs.remove(run)
        run.end()
    consumed = {run.shard.stream for run in going}
    before = len(runs)
    runs += _hold_free([shard for shard in shards if shard.stream not in consumed])
    return [run for run in runs[before:] if run.goes_on(run.begin)]


def _end_all(runs: Sequence[ShardRun]) -> None:
    """End every run, and raise what the first one raised."""
    with ExitStack() as stack:
        for run in reversed(runs):
            stack.callback(run.end)


class ShardRun:
    """One run of a consumer on a shard that it holds."""

    def __init__(self, shard: Shard, lease: ShardLease) -> None:
        self.settings = settings.current()
        self.shard = shard
        self.lease = lease
        self.source = StreamSource(shard, lease)
        self.repeats = Repeats(self.source)
        self.checkpoint = OpenCheckpoint(shard, lease)
        self.sinks: dict[str, CheckpointAwareSink] = {}
        self.state: dict[str, Any] = {}
        self.collected: list[Entry] = []
        self._is_decided = False  # the row is written
        self._checkpoint_at = 0.0  # the last one, by `time.monotonic()`
        self._began_at = 0.0
        self.has_found = False  # entries, in the last step
        self.asked = 0  # how many entries the last batch could have
        self._entry_size = FIRST_ENTRY_CHARACTERS  # the average of the last batch
        self.failure: Exception | None = None
        given = shard.consumer.defers_ack
        self.defers_ack = self.settings.checkpoint_defer_ack if given is None else given

    def begin(self) -> None:
        """Take the place of the consumer before: finish its last checkpoint, and restore the state of the handler."""
        self.sinks = {name: participant(name, self.checkpoint) for name in self.shard.consumer.sinks}
        self.sinks |= {sink.name: sink for sink in self.shard.consumer.own_sinks(self)}
        self.source.open()
        last = checkpoint_rows.newest(self.lease.engine, self.shard)
        if last is None:
            return
        self.state = last.state
        if last.sink_committed:
            self._acknowledge_late(last)
        else:
            self._restore(last)

    def goes_on(self, act: Callable[[], object]) -> bool:
        """Do something, and return whether the run goes on: the shard is still ours, and there was no error."""
        try:
            act()
        except LeaseLost as error:
            self.lose(error)
            return False
        except Exception as error:
            self.failure = error
            return False
        return True

    def step(self) -> None:
        """Read and handle what is there, and commit it if a checkpoint is due."""
        self.has_found = self.collect()
        if self.collected and self._is_due():
            self.commit()

    def commit_rest(self) -> None:
        if self.collected:
            self.commit()

    def collect(self, *, wait_seconds: float = 0.0) -> bool:
        """Read a batch and call the handler. Return False if there was nothing to read."""
        self.lease.check()
        self.asked = self._batch_size()
        entries = self.source.read(self.asked, wait_seconds=wait_seconds)
        failpoint("stream.after_read")
        if not entries:
            return False
        values = chain.from_iterable(entry.fields.values() for entry in entries)
        self._entry_size = sum(map(len, values)) / len(entries)
        if not self.collected:
            if self.defers_ack or self.shard.consumer.sinks:  # only these need an id
                self.checkpoint.id = self.lease.begin_checkpoint()
            self._began_at = time.monotonic()
        self.collected += entries
        if to_handle := self._to_handle(entries):
            writers = {name: sink.writer for name, sink in self.sinks.items()}
            self.shard.consumer.handler(Batch(to_handle, self.state, writers))
        failpoint("stream.after_handler")
        return True

    def commit(self) -> None:
        """Decide the checkpoint of what was collected, commit it, and acknowledge its entries."""
        self._warn_if_late()
        started_at = time.monotonic()
        id_, defers = self.checkpoint.id, self.defers_ack
        prepared = {name: sink.on_checkpoint_start(id_) for name, sink in self.sinks.items()}
        handles = {name: handle for name, handle in prepared.items() if handle is not None}
        decided = Checkpoint(id_, [entry.id for entry in self.collected], self.state, handles)
        failpoint("checkpoint.before_row")
        checkpoint_rows.write(self.lease, decided, [sink.write for sink in self.sinks.values()], with_row=defers)
        self._is_decided = defers
        failpoint("checkpoint.after_row")
        self._complete(decided, has_row=defers)
        self._checkpoint_at = time.monotonic()
        metrics.CHECKPOINT_TOTAL.labels("committed").inc()
        metrics.CHECKPOINT_SECONDS.observe(self._checkpoint_at - started_at)

    def lose(self, error: LeaseLost) -> None:
        """Forget what was collected: another consumer has the shard, and reads the same entries."""
        metrics.CHECKPOINT_TOTAL.labels("lost").inc()
        log_event(FaultEvent.SHARD_LOST, error.message, self.shard, checkpoint=self.checkpoint.id)
        self._abort_sinks()

    def end(self) -> None:
        """Abort what is not decided, and hand over the shard."""
        try:
            if self._is_decided:
                message = f"The checkpoint {self.checkpoint.id} is decided; the next consumer commits it."
                log_event(FaultEvent.CHECKPOINT_NOT_COMMITTED, message, self.shard, checkpoint=self.checkpoint.id)
            elif self.collected:
                self._abort()
        finally:
            self.source.close()
            self.lease.release()

    def _complete(self, decided: Checkpoint, *, has_row: bool) -> None:
        self._finish(decided, self.sinks, self.collected, has_row=has_row)
        self.collected = []
        self._is_decided = False

    def _finish(
        self,
        decided: Checkpoint,
        sinks: Mapping[str, CheckpointAwareSink],
        entries: Sequence[Entry],
        *,
        has_row: bool,
    ) -> None:
        """Make the effects visible, then acknowledge the entries."""
        for sink in sinks.values():
            sink.on_checkpoint_complete(decided.id)
            failpoint("checkpoint.after_sink")
        if has_row:
            failpoint("checkpoint.before_mark")
            checkpoint_rows.mark_committed(self.lease, decided.id)
        failpoint("checkpoint.before_ack")
        self.source.acknowledge(decided.entry_ids)
        failpoint("checkpoint.after_ack")
        self.repeats.remember(entries)

    def _abort(self) -> None:
        metrics.CHECKPOINT_TOTAL.labels("aborted").inc()
        message = f"The checkpoint {self.checkpoint.id} is aborted; its {len(self.collected)} entries are read again."
        fields = {"checkpoint": self.checkpoint.id, "entries": len(self.collected)}
        log_event(FaultEvent.CHECKPOINT_ABORTED, message, self.shard, **fields)
        self._abort_sinks()

    def _abort_sinks(self) -> None:
        for sink in self.sinks.values():
            sink.on_checkpoint_abort(self.checkpoint.id)
        self.collected = []
        self._is_decided = False

    def _restore(self, last: Checkpoint) -> None:
        """Commit what the consumer before has decided."""
        if unknown := sorted(last.handles.keys() - self.sinks.keys()):
            names = ", ".join(unknown)
            raise UnknownSink(f"The checkpoint {last.id} has effects for {names}, which the consumer no longer has.")
        self.checkpoint.id, self._is_decided = last.id, True
        self.source.claim_entries(last.entry_ids)  # a script acknowledges only entries of its own consumer
        for name, handle in last.handles.items():
            self.sinks[name].on_checkpoint_restore(last.id, handle)
        self._complete(last, has_row=True)
        metrics.CHECKPOINT_TOTAL.labels("restored").inc()
        message = f"Committed the checkpoint {last.id}, which an earlier run had decided."
        log_event(FaultEvent.CHECKPOINT_RESTORED, message, self.shard, checkpoint=last.id)

    def _acknowledge_late(self, last: Checkpoint) -> None:
        if late := self.source.acknowledge(last.entry_ids):
            message = f"Acknowledged {late} entries of the checkpoint {last.id}, which an earlier run had committed."
            log_event(FaultEvent.ACKNOWLEDGED_LATE, message, self.shard, checkpoint=last.id, entries=late)

    def _to_handle(self, entries: list[Entry]) -> list[Entry]:
        """Return the entries without those that were deleted from the stream, and without repeats."""
        there = [entry for entry in entries if entry.fields]
        self.source.report_deleted(len(entries) - len(there))
        if not self.settings.sink_dedup_enabled:
            return there
        left = self.repeats.without(there)
        if dropped := len(there) - len(left):
            log_event(FaultEvent.REPEATS_DROPPED, f"Dropped {dropped} repeated messages.", self.shard, entries=dropped)
        return left

    def _batch_size(self) -> int:
        """Return how many entries to read: as many as BATCH_CHARACTERS allow, if they are like the last ones."""
        fitting = BATCH_CHARACTERS / max(1.0, self._entry_size)
        return max(1, min(self.settings.receipt_batch_size, int(fitting)))

    def _is_due(self) -> bool:
        if not self.defers_ack or len(self.collected) >= LARGEST_CHECKPOINT:
            return True
        return time.monotonic() >= self._checkpoint_at + self.settings.checkpoint_interval_ms / 1000

    def wait_seconds(self, now: float, ends_at: float) -> float:
        """Return how long to wait for entries: at most until the next checkpoint, and until the end of the run."""
        longest = min(self.settings.receipt_block_ms / 1000, self.lease.seconds / 3, ends_at - now)
        if not self.collected:
            return longest
        return min(longest, max(0.0, self._checkpoint_at + self.settings.checkpoint_interval_ms / 1000 - now))

    def _warn_if_late(self) -> None:
        """Tell that a handler took long. The shard may be taken over meanwhile; then the decision is refused."""
        limit = (self.settings.checkpoint_interval_ms + self.settings.checkpoint_drain_ms) / 1000
        if (waited := time.monotonic() - self._began_at) > limit:
            message = f"The handler kept the checkpoint {self.checkpoint.id} waiting for {waited:.1f} s."
            log_event(FaultEvent.HANDLER_LATE, message, self.shard, checkpoint=self.checkpoint.id, seconds=waited)
