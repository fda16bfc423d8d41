"""A saver that reads one batch while the ledger writes another: an error loses, doubles and reorders nothing.

In most tests three batches are in work: the first is committed and not acknowledged, the second is being written, and
the third has been read.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable

import pytest

import failpoint
from failpoint import FailpointHit
from models.engine import engine
from models.errors import LeaseLost
from models.sql import sql
from receipts import kinds, save
from receipts.receipt import Receipt
from receipts.save_batch import save_batch
from receipts.streams import overlapped_run
from receipts.streams.overlapped_run import OverlappedRun
from receipts.streams.shard_lease import ShardLease
from receipts.streams.source import StreamSource
from tests.receipts.accepting import KINDS, accepted
from tests.receipts.consuming import consume_until_idle
from tests.receipts.receiving import Receiving
from tests.receipts.saving import assert_once, begin, ledger_ids, save_all, time_passes
from tests.servers import ServersOfTests

COUNT = 8  # four batches of two
SAVED = sql("SELECT count(*) FROM ledger.receipt WHERE level = 'saved'")

pytestmark = [pytest.mark.guarantee, pytest.mark.usefixtures("small_batches", "one_batch_per_turn")]


@pytest.fixture
def one_batch_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step write one batch, so that a test can act between two of them."""
    monkeypatch.setattr(overlapped_run, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(overlapped_run, "HANDED_OVER", 2)


def begin_with_a_committed_batch(holder: str | None = None, kind: str = kinds.CHAT) -> OverlappedRun:
    """Begin a run. Its first batch is committed and not acknowledged, and the second one has been read."""
    run = begin(holder, kind)
    run.step()
    run._batches[0].write.result(10)
    return run


def pending(receiving: Receiving, run: OverlappedRun) -> int:
    return int(receiving.client.xpending(run.shard.key, run.shard.group)["pending"])


def assert_saved_in_order(receiving: Receiving, receipts: list[Receipt]) -> None:
    assert_once(receiving, receipts)
    assert ledger_ids() == [receipt.id for receipt in receipts]


@pytest.mark.parametrize("kind", KINDS)
def test_while_a_batch_is_written_the_next_one_is_read_and_the_one_before_is_acknowledged(
    receiving: Receiving, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of the second batch waits until the third one has been read; without overlap that would never be."""
    receipts = accepted(receiving, kind, COUNT)
    is_read = threading.Event()
    reads: list[int] = []
    _after(monkeypatch, StreamSource, "read", lambda: is_read.set() if len(reads) == 2 else reads.append(1))
    writes: list[int] = []

    def write(*given: object) -> object:
        writes.append(1)
        assert len(writes) != 2 or is_read.wait(10), "the third batch was not read"
        return save_batch(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(save, "save_batch", write)
    run = begin(kind=kind)
    run.step()
    run.step()
    assert pending(receiving, run) == 4, "the second batch and the third one"
    consume_until_idle(run)
    run.end()
    assert_saved_in_order(receiving, receipts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", ["receipts.after_save", "checkpoint.before_ack", "checkpoint.after_ack"])
def test_an_error_while_a_batch_is_acknowledged_waits_for_the_batch_that_is_being_written(
    receiving: Receiving, kind: str, window: str
) -> None:
    receipts = accepted(receiving, kind, COUNT)
    run = begin_with_a_committed_batch(kind=kind)
    failpoint.arm(f"{window}=raise")
    try:
        with pytest.raises(FailpointHit):
            run.step()
    finally:
        failpoint.arm()
    with engine().connect() as connection:
        assert connection.execute(SAVED).scalar_one() == 4, "the transaction has ended"
    run.end()
    save_all()
    assert_saved_in_order(receiving, receipts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", ["receipts.before_save", "checkpoint.before_commit_of_row", "checkpoint.after_row"])
def test_an_error_of_the_write_drops_the_batch_that_was_read_meanwhile(
    receiving: Receiving, kind: str, window: str
) -> None:
    """Otherwise the third batch would be saved before the second one."""
    receipts = accepted(receiving, kind, COUNT)
    run = begin_with_a_committed_batch(kind=kind)
    failpoint.arm(f"{window}=raise")
    try:
        run.step()
        with pytest.raises(FailpointHit):
            run.step()
    finally:
        failpoint.arm()
    assert len(run.collected) == 4, "both are read again"
    run.end()
    save_all()
    assert_saved_in_order(receiving, receipts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saver_that_was_overtaken_with_three_batches_in_work_writes_nothing_more(
    receiving: Receiving, ledger: ServersOfTests, kind: str
) -> None:
    receipts = accepted(receiving, kind, COUNT)
    stale = begin_with_a_committed_batch("stale", kind)
    time_passes(ledger, receiving.client)
    save_all()
    with pytest.raises(LeaseLost) as lost:
        stale.step()
    stale.lose(lost.value)
    stale.end()
    assert_saved_in_order(receiving, receipts)


def test_a_turn_writes_one_batch_after_the_other_and_looks_for_garbage_only_afterwards(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlapped_run, "TURN_SECONDS", 600.0)
    receipts = accepted(receiving, kinds.CHAT, COUNT)
    collects: list[bool] = []
    intervals: set[float] = set()

    def save(*given: object) -> object:
        collects.append(gc.isenabled())
        intervals.add(round(sys.getswitchinterval(), 6))
        return save_batch(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("receipts.save.save_batch", save)
    run, interval = begin(), sys.getswitchinterval()
    run.step()
    assert (intervals, sys.getswitchinterval()) == ({overlapped_run.SWITCH_SECONDS}, interval)
    assert ledger_ids() == [receipt.id for receipt in receipts]
    assert pending(receiving, run) == 0
    assert (collects, gc.isenabled()) == ([False] * 4, True)
    run.end()
    assert_saved_in_order(receiving, receipts)


def test_a_run_that_ends_with_batches_in_work_finishes_them(receiving: Receiving) -> None:
    receipts = accepted(receiving, kinds.CHAT, COUNT)
    run = begin()
    run.step()
    run.commit_rest()
    assert pending(receiving, run) == 0
    run.end()
    assert ledger_ids() == [receipt.id for receipt in receipts[:4]]
    save_all()
    assert_saved_in_order(receiving, receipts)


def test_batches_that_wait_behind_a_write_that_fails_are_not_begun(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three batches are handed over, and the first one fails when the others wait behind it."""
    monkeypatch.setattr(overlapped_run, "TURN_SECONDS", 600.0)
    monkeypatch.setattr(overlapped_run, "HANDED_OVER", 3)
    receipts = accepted(receiving, kinds.CHAT, COUNT)
    are_waiting, writes = threading.Event(), []
    finish = OverlappedRun._finish_first

    def finish_first(run: OverlappedRun) -> None:
        assert len(run._batches) == 3
        are_waiting.set()
        finish(run)

    def fail(*_: object) -> object:
        writes.append(1)
        assert are_waiting.wait(10), "the others were not handed over"
        raise FailpointHit("the write")

    with monkeypatch.context() as patched:
        patched.setattr(OverlappedRun, "_finish_first", finish_first)
        patched.setattr(save, "save_batch", fail)
        run = begin()
        with pytest.raises(FailpointHit):
            run.step()
    assert (len(writes), len(run.collected)) == (1, 6)
    assert ledger_ids() == []
    run.end()
    save_all()
    assert_saved_in_order(receiving, receipts)


def test_a_shard_is_handed_over_after_the_last_write_has_ended(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipts = accepted(receiving, kinds.CHAT, COUNT)
    goes_on, events = threading.Event(), []

    def write(*given: object) -> object:
        assert goes_on.wait(10)
        answer = save_batch(*given)  # type: ignore[arg-type]
        events.append("written")
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(save, "save_batch", write)
        _after(patched, ShardLease, "release", lambda: events.append("released"))
        run = begin()
        run.step()
        timer = threading.Timer(0.2, goes_on.set)
        timer.start()
        run.end()
        timer.join()
    assert events == ["written", "released"]
    save_all()
    assert_saved_in_order(receiving, receipts)


def _after(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, act: Callable[[], object]) -> None:
    """Do something each time that a method has returned."""
    original = getattr(owner, name)

    def call(*given: object, **options: object) -> object:
        answer = original(*given, **options)
        act()
        return answer

    monkeypatch.setattr(owner, name, call)
