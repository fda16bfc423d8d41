"""Checkpoints that fail between their row and the commit of a sink, what is restored, and what recovery does."""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from typing import Any

import psycopg2
import pytest
from sqlalchemy.exc import OperationalError, ProgrammingError
from sqlalchemy.orm import Session

import settings
from models.engine import engine
from models.errors import LeaseLost
from models.guarded_session import GuardedSession, TransactionFailed, TransactionMisused
from receipts.streams.checkpoint_sinks import TwoPhaseInCheckpoint
from receipts.streams.entries import Batch
from receipts.streams.shard_lease import ShardLease
from sinks import transactions
from sinks.contract import SinkMisused, SinkNotReady, UnknownSink
from sinks.prepared_postgres import PreparedPostgres
from sinks.recovery import recover
from sinks.two_phase import Finished
from tests.receipts.conftest import only
from tests.receipts.consuming import StreamUnderTest, checkpoints
from tests.tasks.deliveries import scalar

COUNT = 6
TRANSACTIONS = "SELECT count(*) FROM ledger.sink_transaction WHERE {}"


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(record)["event"] for record in caplog.records if hasattr(record, "event")]


@pytest.mark.guarantee
def test_an_exception_in_on_checkpoint_complete_costs_and_doubles_no_effect(
    stream: StreamUnderTest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream.add(*range(COUNT))
    run, before = stream.begin("first"), checkpoints("restored")
    assert run.collect()

    def fail(_checkpoint_id: int) -> None:
        raise OSError("the sink is full")

    monkeypatch.setattr(run.sinks["place"], "on_checkpoint_complete", fail)
    with pytest.raises(OSError, match="the sink is full"):
        run.commit()
    run.end()
    assert len(stream.unacknowledged()) == 2, "entries are not acknowledged before the sinks have committed"
    stream.finish()
    assert stream.place.seen() == list(range(COUNT))
    assert stream.is_quiet()
    assert checkpoints("restored") == before + 1
    assert events(caplog)[:2] == ["checkpoint_not_committed", "checkpoint_restored"]


@pytest.mark.guarantee
@only("two-phase PostgreSQL")
@pytest.mark.parametrize("done", [Finished.RETRY_LATER, Finished.FAILED, Finished.UNKNOWN])
def test_a_commit_that_the_sink_does_not_obey_is_repeated_and_nothing_is_acknowledged_before(
    stream: StreamUnderTest, monkeypatch: pytest.MonkeyPatch, done: Finished
) -> None:
    stream.add(*range(COUNT))
    with monkeypatch.context() as patched:
        patched.setattr(PreparedPostgres, "commit", lambda *_: done)
        with pytest.raises(SinkNotReady, match="has not committed the checkpoint"):
            stream.consume("first")
        patched.setattr(PreparedPostgres, "recover_and_commit", lambda *_: done)
        for _ in range(2):
            with pytest.raises(SinkNotReady, match="has not committed the checkpoint"):
                stream.consume("first")
        assert stream.place.seen() == []
        assert len(stream.unacknowledged()) == 2
    stream.finish()
    assert stream.place.seen() == list(range(COUNT))
    assert stream.is_quiet()


@pytest.mark.guarantee
def test_a_restart_between_checkpoint_written_and_sink_committed_loses_and_doubles_nothing(
    stream: StreamUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    stream.add(*range(COUNT))
    stream.killed("checkpoint.after_row=kill@2")
    assert scalar("SELECT count(*) FROM ledger.checkpoint WHERE NOT sink_committed") == 1
    stream.time_passes()
    assert stream.consume("another")
    assert stream.place.seen() == list(range(COUNT))
    stream.finish()
    assert stream.is_quiet()
    assert events(caplog).count("checkpoint_restored") == 1


@only("Redis list")
def test_a_handler_is_not_called_again_for_a_checkpoint_that_is_decided(stream: StreamUnderTest) -> None:
    handled: list[str] = []

    def handle(batch: Batch) -> None:
        handled.extend(entry.fields["n"] for entry in batch.entries)
        stream.place.handle(batch)

    counting = StreamUnderTest(stream.servers, stream.place, handler=handle)
    stream.add(0, 1)
    counting.raised("checkpoint.after_row=raise")
    assert counting.consume()
    assert handled == ["0", "1"]
    assert stream.place.seen() == [0, 1]


@only("Redis list")
def test_a_restart_between_mark_and_acknowledgement_only_acknowledges(
    stream: StreamUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    stream.add(0, 1)
    stream.raised("checkpoint.before_ack=raise")
    assert len(stream.unacknowledged()) == 2
    assert stream.consume()
    assert stream.unacknowledged() == []
    assert stream.place.seen() == [0, 1]
    assert "entries_acknowledged_late" in events(caplog)


@pytest.mark.guarantee
def test_a_consumer_that_loses_the_answer_of_its_commit_and_then_its_shard_undoes_nothing(
    stream: StreamUnderTest,
) -> None:
    """The checkpoint is decided, but this consumer cannot know: the shard belongs to another one when it asks."""
    stream.add(*range(COUNT))
    first = stream.begin("first")
    assert first.collect()
    commit = GuardedSession.commit_as_owner
    taken: list[ShardLease | None] = []

    def commit_and_lose_the_answer(db: GuardedSession) -> None:
        patched.undo()
        commit(db)
        stream.time_passes()
        taken.append(ShardLease.take(engine(), stream.shard("second"), seconds=60))
        error = psycopg2.OperationalError("server closed the connection unexpectedly")
        raise OperationalError("COMMIT", {}, error, connection_invalidated=True)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GuardedSession, "commit_as_owner", commit_and_lose_the_answer)
        with pytest.raises(LeaseLost) as lost:
            first.commit()
    first.lose(lost.value)
    first.end()
    assert taken[0]
    taken[0].release()
    stream.finish()
    assert stream.place.seen() == list(range(COUNT))
    assert stream.is_quiet()


@only("two-phase PostgreSQL")
def test_recovery_leaves_the_transaction_of_a_consumer_that_holds_its_shard(stream: StreamUnderTest) -> None:
    stream.add(0, 1)
    run = stream.begin("first")
    assert run.collect()
    for sink in run.sinks.values():
        sink.on_checkpoint_start(run.checkpoint.id)
    assert recover(engine()).left
    assert scalar(TRANSACTIONS.format("decision IS NULL")) == 1
    run.end()
    assert stream.place.left_behind() == []


@pytest.mark.guarantee
@only("two-phase PostgreSQL", "files")
@pytest.mark.parametrize("how", ["lease expired", "taken over"])
def test_recovery_aborts_the_transaction_of_a_consumer_that_lost_its_shard(stream: StreamUnderTest, how: str) -> None:
    """Without that, the locks of a consumer that is never started again would stay for ever."""
    stream.add(0, 1)
    stream.killed("checkpoint.after_prepare=kill")
    assert recover(engine()).aborted == []
    stream.time_passes()
    if how == "taken over":
        stream.begin("another").end()
    assert len(recover(engine()).aborted) == 1
    assert stream.place.left_behind() == []
    stream.finish()
    assert stream.place.seen() == [0, 1]
    assert stream.is_quiet()


@pytest.mark.guarantee
@only("two-phase PostgreSQL", "files")
def test_a_transaction_that_is_prepared_after_it_was_aborted_is_rolled_back(stream: StreamUnderTest) -> None:
    stream.add(0, 1)
    run = stream.begin("first")
    assert run.collect()
    sink = run.sinks["place"]
    assert isinstance(sink, TwoPhaseInCheckpoint)
    with pytest.MonkeyPatch.context() as patched:

        def prepare_late(txn: Any) -> None:
            patched.undo()
            stream.time_passes()
            assert stream.consume("second")
            assert len(recover(engine()).aborted) == 1
            sink.sink.pre_commit(txn)

        patched.setattr(sink.sink, "pre_commit", prepare_late)
        with pytest.raises(LeaseLost):
            run.commit()
    run.source.close()  # the process dies here, with the transaction prepared
    assert stream.place.left_behind() != []
    recover(engine())
    assert stream.place.seen() == [0, 1]
    assert stream.place.left_behind() == []


@only("two-phase PostgreSQL")
def test_recovery_commits_what_is_decided_and_the_next_consumer_finds_it_done(stream: StreamUnderTest) -> None:
    stream.add(*range(COUNT))
    stream.killed("checkpoint.after_row=kill")
    assert len(recover(engine()).committed) == 1
    assert stream.place.seen() == [0, 1]
    stream.finish()
    assert stream.place.seen() == list(range(COUNT))
    assert stream.is_quiet()


@only("two-phase PostgreSQL")
def test_transactions_of_checkpoints_are_pruned_after_a_week(stream: StreamUnderTest) -> None:
    """Until then recovery can roll back what was prepared late."""
    stream.add(0)
    assert stream.consume()
    for seconds, left in ((6 * 86400, 1), (86400 + 60, 0)):
        stream.time_passes(seconds)
        with Session(engine()) as db:
            transactions.prune(db)
            db.commit()
        assert scalar(TRANSACTIONS.format("true")) == left


@only("Redis list")
def test_the_state_of_a_handler_survives_a_restart_and_belongs_to_its_entries(stream: StreamUnderTest) -> None:
    def add_up(batch: Batch) -> None:
        batch.state["sum"] = batch.state.get("sum", 0) + sum(int(entry.fields["n"]) for entry in batch.entries)
        for entry in batch.entries:
            batch.sink("place").append(entry, "effects", batch.state["sum"])

    counting = StreamUnderTest(stream.servers, stream.place, handler=add_up)
    counting.add(1, 2)
    assert counting.consume("first")
    counting.add(3, 4)
    counting.raised("checkpoint.before_row=raise")
    counting.add(5, 6)
    counting.finish()
    assert stream.place.seen() == [3, 3, 10, 10, 21, 21]
    assert scalar("SELECT state -> 'handler' ->> 'sum' FROM ledger.checkpoint") == "21"


@only("atomic")
def test_a_state_that_is_not_json_aborts_the_checkpoint(stream: StreamUnderTest) -> None:
    def spoil(batch: Batch) -> None:
        stream.place.handle(batch)
        batch.state["bad"] = float("nan")

    spoiled = StreamUnderTest(stream.servers, stream.place, handler=spoil)
    stream.add(0)
    with pytest.raises(Exception, match="The state of the consumer is not valid JSON"):
        spoiled.consume()
    assert stream.place.seen() == []
    assert len(stream.unacknowledged()) == 1


@only("atomic")
@pytest.mark.parametrize(
    ("statement", "error"), [("COMMIT", TransactionMisused), ("ROLLBACK", TransactionMisused), ("1", TransactionFailed)]
)
def test_a_function_that_spoils_the_transaction_of_the_checkpoint_is_refused(
    stream: StreamUnderTest, statement: str, error: type[Exception]
) -> None:
    def spoil(batch: Batch) -> None:
        def write(db: Session) -> None:
            with suppress(ProgrammingError):
                db.connection().exec_driver_sql(statement)

        batch.sink("place").run(write)

    spoiled = StreamUnderTest(stream.servers, stream.place, handler=spoil)
    stream.add(0)
    with pytest.raises(error):
        spoiled.consume()
    assert scalar("SELECT count(*) FROM ledger.checkpoint") == 0
    assert len(stream.unacknowledged()) == 1


@only("Redis list")
def test_a_checkpoint_with_effects_for_a_sink_that_was_removed_stops_the_consumer(stream: StreamUnderTest) -> None:
    stream.add(0)
    stream.raised("checkpoint.after_row=raise")
    stream.consumer = type(stream.consumer)("save", "orders", stream.place.handle)
    with pytest.raises(UnknownSink, match="has effects for place, which the consumer no longer has"):
        stream.consume()
    assert len(stream.unacknowledged()) == 1


@only("atomic")
def test_a_keyed_postgresql_cannot_take_part_in_a_checkpoint(
    stream: StreamUnderTest, configure: Any, other: Any
) -> None:
    configure(place={"url": other.url.render_as_string(hide_password=False), "guarantee": "keyed"})
    stream.add(0)
    with pytest.raises(SinkMisused, match="The sink place serves tasks only"):
        stream.consume()


@only("Redis list")
@pytest.mark.parametrize(("drain", "logged"), [("0", ["handler_late"]), ("50000", [])])
def test_a_handler_that_keeps_a_checkpoint_waiting_is_logged(
    stream: StreamUnderTest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    drain: str,
    logged: list[str],
) -> None:
    monkeypatch.setenv("CHECKPOINT_DRAIN_MS", drain)
    settings.current.cache_clear()
    stream.add(0)
    run = stream.begin("first")
    assert run.collect()
    run._began_at -= 40.0
    with caplog.at_level(logging.WARNING):
        run.commit()
    run.end()
    assert events(caplog) == logged


@only("Redis list")
def test_a_consumer_waits_for_entries_and_until_the_next_checkpoint_as_the_settings_say(
    stream: StreamUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECEIPT_BLOCK_MS", "7000")
    monkeypatch.setenv("CHECKPOINT_INTERVAL_MS", "3000")
    settings.current.cache_clear()
    stream.add(0)
    run = stream.begin("first")
    assert run.collect()
    run.commit()
    now = time.monotonic()
    assert run.wait_seconds(now, now + 100) == 7
    stream.add(1)
    assert run.collect()
    assert run.wait_seconds(now, now + 100) == pytest.approx(3, abs=1)
    run.commit()
    run.end()


@only("Redis list")
def test_old_checkpoints_are_deleted(stream: StreamUnderTest) -> None:
    stream.add(*range(10))
    assert stream.consume()
    rows = scalar("SELECT jsonb_agg(offsets) FROM ledger.checkpoint")
    assert [len(offsets["ids"]) for offsets in rows] == [2], json.dumps(rows)
