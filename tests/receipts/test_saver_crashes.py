"""A saver or deliverer that dies, loses a reply or is overtaken: every accepted message is saved once, in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import redis
from sqlalchemy.exc import OperationalError

import failpoint
import settings
from chaos.fault_proxy import COMMIT, EVALSHA, Fault, FaultProxy
from models.engine import engine
from models.errors import LeaseLost, Unreachable
from receipts import kinds
from receipts.save import save_any_shard
from receipts.streams import checkpoint_rows
from receipts.streams.checkpoint_rows import Checkpoint
from receipts.streams.shard_lease import ShardLease
from tests.receipts.accepting import KINDS, accepted, chat, deliver_before_saved, document
from tests.receipts.consuming import consume_until_idle, point_at
from tests.receipts.receiving import Receiving
from tests.receipts.saving import assert_once, begin, deliver_all, killed, ledger_ids, save_all, shard_of, time_passes
from tests.servers import ServersOfTests

COUNT = 6  # three batches of two
# A saver reads its streams in turn, so that the read of a kind has this number.
READ = [rb"WATCH ", rb"EVAL ", rb"XREADGROUP ", rb"EXEC"]
READS = {kinds.CHAT: 1, kinds.TASKS: 3, kinds.DOCUMENTS: 5}
SAVER_WINDOWS = (
    "receipts.before_save",
    "checkpoint.before_commit_of_row",
    "receipts.after_save",
    "checkpoint.before_ack",
    "checkpoint.after_ack",
)
DELIVERER_WINDOWS = (
    "stream.after_read",
    "receipts.before_push",
    "receipts.after_push",
    "receipts.after_move",
    "checkpoint.before_ack",
    "checkpoint.after_ack",
)
SAVER_CASES = [(kind, f"{window}=kill@2") for kind in KINDS for window in SAVER_WINDOWS]
SAVER_CASES += [(kind, f"stream.after_read=kill@{number}") for kind, number in READS.items()]

pytestmark = [pytest.mark.guarantee, pytest.mark.usefixtures("small_batches")]


@pytest.mark.parametrize(("kind", "failpoints"), SAVER_CASES)
def test_a_saver_that_is_killed_anywhere_loses_and_doubles_nothing(
    receiving: Receiving, ledger: ServersOfTests, kind: str, failpoints: str
) -> None:
    receipts = accepted(receiving, kind, COUNT)
    killed(save_all, failpoints)
    time_passes(ledger, receiving.client)
    save_all()
    assert_once(receiving, receipts)
    assert ledger_ids() == [receipt.id for receipt in receipts]


@pytest.mark.parametrize("window", DELIVERER_WINDOWS)
def test_a_deliverer_that_is_killed_anywhere_loses_and_doubles_nothing(
    receiving: Receiving, ledger: ServersOfTests, window: str
) -> None:
    deliver_before_saved()
    receipts = accepted(receiving, kinds.CHAT, COUNT)
    killed(deliver_all, f"{window}=kill@2")
    time_passes(ledger, receiving.client)
    deliver_all()
    save_all()
    assert_once(receiving, receipts)
    assert ledger_ids() == [receipt.id for receipt in receipts]


def test_a_deliverer_that_is_killed_after_its_last_message_leaves_nothing_in_the_streams(
    receiving: Receiving, ledger: ServersOfTests
) -> None:
    """Otherwise switching two-phase off would wait for an entry that no one has anything to do with."""
    deliver_before_saved()
    receipts = accepted(receiving, kinds.CHAT, 1)
    killed(deliver_all, "receipts.after_move=kill")
    time_passes(ledger, receiving.client)
    deliver_all()
    save_all()
    assert_once(receiving, receipts)


def test_a_saver_that_dies_again_and_again_while_it_recovers_saves_each_message_once(
    receiving: Receiving, ledger: ServersOfTests
) -> None:
    receipts = [each for kind in KINDS for each in accepted(receiving, kind, 2)]
    for window in SAVER_WINDOWS:
        killed(save_all, f"{window}=kill")
        time_passes(ledger, receiving.client)
    save_all()
    assert_once(receiving, receipts)


def test_a_stream_that_failed_once_is_saved_although_the_saver_of_the_other_streams_goes_on(
    receiving: Receiving,
) -> None:
    """A lost connection or a deadlock concerns one batch. Its stream must not wait until the whole run is over."""
    receipts = accepted(receiving, kinds.TASKS, 1)
    failpoint.arm("receipts.before_save=raise")
    assert save_any_shard(2)
    assert_once(receiving, receipts)


def test_a_stream_that_fails_again_and_again_costs_the_other_streams_nothing(receiving: Receiving) -> None:
    receipts = accepted(receiving, kinds.CHAT, 1)
    bad = document(receiving, 0)
    receiving.client.delete(kinds.accepted_stream(kinds.DOCUMENTS))
    receiving.client.set(kinds.accepted_stream(kinds.DOCUMENTS), "not a stream")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        save_any_shard(1.5)
    assert ledger_ids() == [receipt.id for receipt in receipts]
    assert bad.id not in ledger_ids()


@pytest.fixture
def ledger_line(receiving: Receiving, ledger: ServersOfTests) -> Iterator[FaultProxy]:
    """The way of the saver to the ledger."""
    database = settings.current().database_url
    with FaultProxy(database) as proxy:
        point_at(ledger, DATABASE_URL=proxy.url)
        yield proxy
        point_at(ledger, DATABASE_URL=database)


@pytest.fixture
def redis_line(receiving: Receiving, ledger: ServersOfTests) -> Iterator[FaultProxy]:
    """The way of the saver and the deliverer to Redis."""
    address = settings.current().redis_url
    with FaultProxy(address) as proxy:
        point_at(ledger, REDIS_URL=proxy.url)
        yield proxy
        point_at(ledger, REDIS_URL=address)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.RESET])
def test_a_commit_whose_reply_is_lost_saves_each_message_once(
    receiving: Receiving, ledger_line: FaultProxy, kind: str, fault: Fault
) -> None:
    receipts = accepted(receiving, kind, COUNT)
    ledger_line.arm(fault, COMMIT)
    with pytest.raises((OperationalError, Unreachable)):
        save_all()
    assert ledger_line.strikes
    save_all()
    assert_once(receiving, receipts)
    assert ledger_ids() == [receipt.id for receipt in receipts]


@pytest.mark.parametrize(
    ("command", "nth"), [*((EVALSHA, nth) for nth in range(1, 8)), *itertools.product(READ, (1, 2, 3))]
)
def test_a_reply_of_redis_that_a_saver_never_gets_costs_no_message(
    receiving: Receiving, redis_line: FaultProxy, command: bytes, nth: int
) -> None:
    """The scripts that claim, tell and acknowledge, and the commands that read, of the first batches."""
    receipts = accepted(receiving, kinds.CHAT, COUNT)
    run = begin()
    redis_line.arm(Fault.LOSE_REPLY, command, nth=nth)
    with pytest.raises(Unreachable):
        consume_until_idle(run)
    run.end()
    assert redis_line.strikes
    save_all()
    assert_once(receiving, receipts)
    assert ledger_ids() == [receipt.id for receipt in receipts]


def test_of_two_savers_one_has_the_shard(receiving: Receiving) -> None:
    receipts = accepted(receiving, kinds.CHAT, COUNT)
    first = begin("first")
    assert ShardLease.take(engine(), shard_of(kinds.CHAT, holder="second"), seconds=10) is None
    assert first.collect()
    first.commit()
    first.end()
    assert save_any_shard(10, until_idle=True), "a saver that ends hands over its shard at once"
    assert_once(receiving, receipts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saver_that_was_overtaken_before_its_commit_writes_nothing(
    receiving: Receiving, ledger: ServersOfTests, kind: str
) -> None:
    receipts = accepted(receiving, kind, COUNT)
    stale = begin("stale", kind)
    assert stale.collect()
    time_passes(ledger, receiving.client)
    save_all()
    with pytest.raises(LeaseLost) as lost:
        stale.commit()
    stale.lose(lost.value)
    stale.end()
    assert_once(receiving, receipts)
    assert ledger_ids() == [receipt.id for receipt in receipts]


def test_a_saver_that_was_overtaken_after_its_commit_acknowledges_nothing_of_the_other(
    receiving: Receiving, ledger: ServersOfTests
) -> None:
    """It wakes up, tells and acknowledges, while its successor has read a message that is not saved yet."""
    receipts = accepted(receiving, kinds.CHAT, 1)
    stale = begin("stale")
    assert stale.collect()
    decided = Checkpoint(0, [entry.id for entry in stale.collected])
    writes = [sink.write for sink in stale.sinks.values()]
    checkpoint_rows.write(stale.lease, decided, writes, with_row=False)  # now it is suspended
    time_passes(ledger, receiving.client)
    receipts.append(chat(receiving, 1))
    active = begin("active")
    assert active.collect()  # the message of the stale one
    active.commit()
    assert active.collect()  # the new message
    with pytest.raises(LeaseLost):
        stale._complete(decided, has_row=False)
    stale.end()
    assert not receiving.is_empty()
    active.commit()
    active.end()
    assert_once(receiving, receipts)
