"""Several consumers of one shard: one at a time writes, and entries keep their order when it changes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

import pytest

from models.engine import engine
from models.errors import LeaseLost
from receipts.streams import fenced_read
from receipts.streams.consume import ShardRun
from receipts.streams.consumers import StreamConsumer
from receipts.streams.entries import Batch
from sinks.contract import SinkMisused
from sinks.recovery import recover
from tests.receipts.conftest import only
from tests.receipts.consuming import GROUP, StreamUnderTest, checkpoints, consume_until_idle, void
from tests.receipts.places import STREAM
from tests.tasks.deliveries import scalar
from tests.tasks.lost_workers import start_child

COUNT = 6


@pytest.mark.guarantee
def test_the_entries_of_a_dead_consumer_come_before_new_ones(stream: StreamUnderTest) -> None:
    stream.add(0, 1)
    stream.killed("stream.after_handler=kill")
    stream.add(2, 3)
    stream.time_passes()
    assert stream.consume("another")
    assert stream.place.seen() == [0, 1, 2, 3]
    stream.finish()
    assert stream.is_quiet()


@only("Redis list")
def test_new_entries_wait_until_those_of_a_dead_consumer_are_idle_for_long_enough(stream: StreamUnderTest) -> None:
    """Otherwise they would overtake: the entries of another consumer may not be claimed before their time."""
    stream.add(0, 1)
    stream.killed("stream.after_read=kill")
    stream.add(2)
    owners = [entry["consumer"] for entry in stream.unacknowledged()]
    stream.time_passes()
    stream.client.xclaim(STREAM, GROUP, owners[0], 0, [stream.unacknowledged()[0]["message_id"]], idle=59_000)
    assert stream.consume("another")
    assert stream.place.seen() == []
    stream.time_passes()
    assert stream.consume("another")
    assert stream.place.seen() == [0, 1, 2]


@only("Redis list")
def test_consumers_that_are_gone_do_not_stay_in_the_group(stream: StreamUnderTest) -> None:
    for n in range(3):
        stream.add(n)
        assert stream.consume(f"consumer {n}")
    assert [consumer["name"] for consumer in stream.client.xinfo_consumers(STREAM, GROUP)] == ["consumer 2"]


def test_a_shard_has_one_consumer_at_a_time(stream: StreamUnderTest) -> None:
    stream.add(*range(COUNT))
    first = stream.begin("first")
    assert first.collect()
    assert not stream.consume("second")
    first.commit()
    assert not stream.consume("second")
    first.end()
    assert stream.consume("second"), "a consumer that ends hands over its shard at once"
    assert stream.place.seen() == list(range(COUNT))
    assert stream.is_quiet()


@pytest.mark.guarantee
def test_a_consumer_that_lost_its_shard_before_the_decision_writes_nothing(
    stream: StreamUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one handles entries, and is then suspended for so long that the second one handles them, too."""
    stream.add(*range(COUNT))
    first, before = stream.begin("first"), checkpoints("lost")
    assert first.collect()
    stream.time_passes()
    assert stream.consume("second")
    with pytest.raises(LeaseLost, match="Another consumer has the shard 0 of orders@save") as lost:
        first.commit()
    first.lose(lost.value)
    first.end()
    recover(engine())
    assert stream.place.seen() == list(range(COUNT))
    assert stream.is_quiet()
    assert checkpoints("lost") == before + 1
    assert [record.event for record in caplog.records if hasattr(record, "event")][-1] == "shard_lost"


@pytest.mark.guarantee
def test_a_consumer_that_lost_its_shard_after_the_decision_repeats_nothing(
    stream: StreamUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint was decided, and the second consumer has committed it. Then the first one goes on."""
    stream.add(*range(COUNT))
    first = stream.begin("first")
    assert first.collect()

    sink = first.sinks["place"]
    complete = sink.on_checkpoint_complete

    def complete_late(checkpoint_id: int) -> None:
        stream.time_passes()
        assert stream.consume("second")
        complete(checkpoint_id)

    monkeypatch.setattr(sink, "on_checkpoint_complete", complete_late)
    with pytest.raises(LeaseLost) as lost:
        first.commit()
    first.lose(lost.value)
    first.end()
    recover(engine())
    assert stream.place.seen() == list(range(COUNT))
    assert stream.is_quiet()


@only("Redis list")
def test_a_consumer_that_lost_its_shard_cannot_read_ahead_of_the_new_one(stream: StreamUnderTest) -> None:
    """Entries that it read would come behind later ones: the new consumer could claim them only after a minute."""
    first = stream.begin("first")
    assert not first.collect()
    stream.time_passes()
    second = stream.begin("second")
    assert not second.collect()
    stream.add(*range(COUNT))
    with pytest.raises(LeaseLost):
        first.collect()
    first.end()
    consume_until_idle(second)
    second.end()
    assert stream.place.seen() == list(range(COUNT))


@pytest.mark.guarantee
@only("Redis list")
def test_a_consumer_that_loses_its_shard_between_the_check_and_the_read_takes_no_entry(
    stream: StreamUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has its token when it asks; before it reads, another consumer has written its own."""
    first = stream.begin("first")
    assert not first.collect()
    stream.add(*range(COUNT))
    second: list[ShardRun] = []
    ask = fenced_read._ask

    def ask_and_be_overtaken(connection: object, commands: Sequence[Sequence[object]]) -> list[object]:
        answers = ask(connection, commands)
        if commands[0][0] == "WATCH" and not second:
            stream.time_passes()
            second.append(stream.begin("second"))
        return answers

    monkeypatch.setattr(fenced_read, "_ask", ask_and_be_overtaken)
    with pytest.raises(LeaseLost):
        first.collect()
    assert not stream.unacknowledged()
    first.end()
    consume_until_idle(second[0])
    second[0].end()
    assert stream.place.seen() == list(range(COUNT))


@only("Redis list")
def test_a_stale_consumer_that_names_itself_holder_in_redis_does_not_stop_the_new_one(stream: StreamUnderTest) -> None:
    """It was suspended between taking the shard and writing its token, and then replaced the token of the new one."""
    first = stream.begin("first")
    stream.time_passes()
    second = stream.begin("second")
    with pytest.raises(LeaseLost):
        first.source._become_holder()
    stream.add(*range(COUNT))
    consume_until_idle(second)
    assert stream.place.seen() == list(range(COUNT))
    first.end()
    second.end()


@only("two-phase PostgreSQL")
def test_a_lease_that_expired_and_was_not_taken_over_is_still_valid(stream: StreamUnderTest) -> None:
    stream.add(0, 1)
    run = stream.begin("first")
    assert run.collect()
    stream.time_passes()
    run.commit()
    run.end()
    assert stream.place.seen() == [0, 1]
    assert stream.is_quiet()


@pytest.mark.guarantee
@only("Redis list", "Redis script", "two-phase PostgreSQL")
def test_two_processes_at_once_and_kills_keep_the_order_of_a_shard(stream: StreamUnderTest) -> None:
    windows = ("stream.after_handler", "checkpoint.after_row", "checkpoint.before_ack", "checkpoint.before_row")
    for round_, window in enumerate(windows):
        stream.add(*range(10 * round_, 10 * round_ + 10))
        pids = [start_child(lambda: void(stream.consume()), failpoints=f"{window}=kill@2") for _ in range(2)]
        for pid in pids:
            os.waitpid(pid, 0)
        stream.time_passes()
    stream.finish()
    assert stream.place.seen() == list(range(10 * len(windows)))
    assert stream.is_quiet()


@only("Redis list")
def test_the_shard_of_a_consumer_that_is_stopped_by_a_signal_is_free_at_once(stream: StreamUnderTest) -> None:
    def stop(_batch: Batch) -> None:
        raise SystemExit

    stopped = StreamUnderTest(stream.servers, stream.place, handler=stop)
    stream.add(0)
    with pytest.raises(SystemExit):
        stopped.consume("first")
    assert scalar("SELECT count(*) FROM ledger.shard_lease WHERE lease_token IS NOT NULL") == 0
    stopped.client.close()


@only("Redis list")
def test_a_claim_from_a_dead_consumer_is_logged_with_its_stream_and_number(
    stream: StreamUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    stream.add(0, 1)
    stream.killed("stream.after_read=kill")
    stream.time_passes()
    with caplog.at_level(logging.WARNING):
        assert stream.consume("another")
    (claimed,) = [record for record in caplog.records if getattr(record, "event", "") == "entries_claimed"]
    assert (vars(claimed)["stream"], vars(claimed)["shard"], vars(claimed)["entries"]) == ("orders@save", 0, 2)


@only("Redis list")
def test_a_consumer_without_entries_keeps_its_shard(stream: StreamUnderTest) -> None:
    run = stream.begin("first")
    stream.time_passes(59)
    run.lease.renewed_at -= 59
    assert not run.collect()
    stream.time_passes(59)
    assert not stream.consume("second")
    run.end()


@only("Redis list")
def test_a_consumer_that_cannot_begin_releases_its_shard(stream: StreamUnderTest) -> None:
    stream.consumer = StreamConsumer(GROUP, "orders}", stream.place.handle)
    with pytest.raises(SinkMisused, match="unpaired brace"):
        stream.consume("first")
    assert scalar("SELECT count(*) FROM ledger.shard_lease WHERE lease_token IS NOT NULL") == 0


@only("Redis list")
def test_a_group_that_an_operator_has_moved_ahead_waits_instead_of_asking_without_end(stream: StreamUnderTest) -> None:
    run = stream.begin("first")
    assert not run.collect()
    stream.add(0, 1)
    stream.client.xgroup_setid(STREAM, GROUP, "$")
    assert not run.collect(wait_seconds=5)
    started_at = time.monotonic()
    assert not run.collect(wait_seconds=0.05)
    assert time.monotonic() - started_at >= 0.05
    stream.add(2)
    assert run.collect(wait_seconds=5)
    run.commit()
    run.end()
    assert stream.place.seen() == [2]
