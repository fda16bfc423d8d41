"""Kafka keeps a record until the claim is committed, then the ledger owns its tasks: delivered twice, run once."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import signal
import threading
import uuid
from typing import Any

import pytest
from sqlalchemy import Connection, event
from sqlalchemy.exc import OperationalError

import settings
from failpoint import arm
from models.engine import engine, make_engine
from outbox.after_commit_publisher import after_commit_publisher
from tally.append import Counted
from tally.counts import counts
from tally.subjects import Subject
from tasks.core import batch_size
from tasks.execution.deliver import deliver
from tasks.execution.stopping import WorkerStops
from tasks.kafka import intake as intake_module
from tasks.kafka import worker as worker_module
from tasks.kafka.intake import Intake, ids_of
from tasks.kafka.worker import Worker
from tasks.operations.pauses import pause_queue, resume_queue, wake_resumed
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import are_well, claimed, counted, handled, scripted, watching
from tests.tasks.kafka.conftest import NewWorker
from tests.tasks.kafka.topic import Topic, reclaimed, submitted_in_sql, turn_until
from tests.tasks.work import SCRIPTS, effects, insert, rows, task, wakeups


@pytest.mark.guarantee
def test_the_claim_is_on_disk_before_the_offset_is_committed(topic: Topic, worker: NewWorker) -> None:
    """Claims of transactional handlers are normally not flushed; here a crash must not lose claim and record."""
    ids = submitted_in_sql(3)
    topic.wakeup(ids)
    claims: list[tuple[set[str], int]] = []

    def note(_connection: Connection, _cursor: Any, _statement: str, parameters: Any, *_: Any) -> None:
        if isinstance(parameters, dict) and "relaxed" in parameters:  # the claim, which commits by itself
            claims.append((set(parameters["relaxed"].strip("{}").split(",")), topic.progress().waiting))

    one = worker()
    with watching(engine(), "after_cursor_execute", note):
        turn_until(one, 3)
    assert claims[0] == ({'"False"'}, 3), "a claim without synchronous_commit, or a commit of the offset before it"
    are_well(ids)
    wait_until(lambda: one.turn(0) == 0 and not topic.progress().waiting, "the offsets are committed")


def test_a_worker_takes_no_more_slow_tasks_than_it_runs(topic: Topic, worker: NewWorker) -> None:
    """Otherwise it would send wake-ups for all others after each task: 1,770 for 60 tasks."""
    with handled("test.slow", insert) as slow:
        ids = submitted_in_sql(60, "test.slow")
        before = len(wakeups())
        topic.wakeup(ids)
        one = worker()

        def turn() -> bool:
            batch_size._seconds[slow.type] = 1.0
            one.turn(0.2)
            assert after_commit_publisher().wait_until_idle(10)
            return set(rows("status")) == {("SUCCEEDED",)}

        wait_until(turn, "all have succeeded")
    assert effects() == dict.fromkeys(ids, 1)
    assert len(wakeups()) - before <= len(ids)


def test_ids_of_many_records_are_claimed_together_one_claim_per_type(topic: Topic, worker: NewWorker) -> None:
    one = worker()
    wait_until(lambda: one.turn(0.1) == 0 and one.intake.assigned(), "the worker has its partitions")
    inserts, many = submitted_in_sql(20), submitted_in_sql(20, "test.many")
    topic.wakeup([id_ for pair in zip(inserts, many, strict=True) for id_ in pair])
    turn_until(one, 40)
    are_well([*inserts, *many])
    claims = {at for (at,) in rows("updated_at", "true")}
    assert len(claims) <= 4  # two, unless the records came in two fetches


@pytest.mark.parametrize(
    "value", [b"", b"not JSON", b"{}", b'{"ids": 7}', b'{"ids": []}', b'{"ids": ["no id"]}', b"\xff", b"[" * 100_000]
)
def test_a_record_that_is_not_a_wakeup_is_counted_and_names_no_task(value: bytes) -> None:
    skipped = Counted(Subject.TASK, "skipped")
    counts._reset()
    assert ids_of(value) == []
    assert counts._sums[skipped].count == 1


@pytest.mark.guarantee
def test_a_malformed_record_is_skipped_and_blocks_no_other_record(
    topic: Topic, worker: NewWorker, caplog: pytest.LogCaptureFixture
) -> None:
    ids = submitted_in_sql(1)
    topic.put(b"canary, and no JSON", b'{"ids": {}}')
    topic.wakeup(ids)
    before = counted()["skipped"]
    one = worker()
    with caplog.at_level(logging.WARNING):
        turn_until(one, 1)
    are_well(ids)
    assert counted()["skipped"] - before == 2
    assert f"{topic.name}/0/1 has no task ids" in caplog.text
    assert "canary" not in caplog.text
    wait_until(lambda: one.turn(0) == 0 and not topic.progress().waiting, "the offsets are committed")


def test_the_offset_of_a_malformed_record_is_committed_even_without_others(topic: Topic, worker: NewWorker) -> None:
    topic.put(b"no")
    one = worker()
    wait_until(lambda: one.turn(0.1) == 0 and not topic.progress().waiting, "its offset is committed")
    assert topic.progress().ends[0] == 1


def test_a_task_of_a_paused_queue_runs_after_the_queue_was_resumed(topic: Topic, worker: NewWorker) -> None:
    ids = submitted_in_sql(1)
    pause_queue(engine(), settings.current(), "ingest", actor="me")
    topic.wakeup(ids)
    one = worker()
    wait_until(lambda: one.turn(0.1) == 0 and not topic.progress().waiting, "its offset is committed")
    assert rows("status", "true") == [("QUEUED",)]
    assert list(wake_resumed(engine(), resume_queue(engine(), settings.current(), "ingest")))
    topic.wakeup(ids)
    turn_until(one, 1)
    are_well(ids)


@pytest.mark.guarantee
def test_a_record_delivered_to_two_workers_at_once_runs_once(
    topic: Topic, worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups get every record twice, as after a rebalance that lost a commit."""
    started, go = threading.Event(), threading.Event()

    def held_up(each: Any, db: Any) -> None:
        insert(each, db)
        started.set()
        assert go.wait(20)

    SCRIPTS["held up"] = held_up
    ids = submitted_in_sql(1, "test.scripted", json.dumps({"do": "held up"}))
    topic.wakeup(ids)
    first = worker()
    monkeypatch.setenv("KAFKA_GROUP", "another")
    settings.current.cache_clear()
    second = worker()
    running = threading.Thread(target=turn_until, args=(first, 1))
    running.start()
    assert started.wait(20)
    before = counted()["skipped"]
    turn_until(second, 1)
    assert counted()["skipped"] == before + 1
    go.set()
    running.join()
    are_well(ids)


def test_a_task_of_an_unknown_type_gets_a_later_wakeup_and_its_offset_is_committed(
    topic: Topic, worker: NewWorker
) -> None:
    ids = submitted_in_sql(1, "not.yet.deployed")
    topic.wakeup(ids)
    one = worker()
    turn_until(one, 1)
    wait_until(lambda: one.turn(0) == 0 and not topic.progress().waiting, "the offset is committed")
    assert (wakeups()[-1].ids, wakeups()[-1].due_at is None) == (ids, False)
    assert rows() == [("QUEUED", 0)]


@pytest.mark.guarantee
def test_records_are_kept_while_the_ledger_is_unreachable(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "PAUSE_SECONDS", 0.01)
    ids = submitted_in_sql(5)
    topic.wakeup(ids)
    unreachable = make_engine(settings.current().database_url)
    refusals = iter(range(3))

    def refuse(*_: Any) -> None:
        if next(refusals, None) is not None:
            raise OperationalError("connect", None, Exception("unreachable"))

    event.listen(unreachable, "do_connect", refuse)
    one = Worker(unreachable, Intake(settings.current()))
    turn_until(one, 5)
    one.intake.close()
    unreachable.dispose()
    assert next(refusals, None) is None, "the ledger was never unreachable"
    are_well(ids)
    assert topic.progress().waiting == 0


@pytest.mark.usefixtures("known_handlers")
def test_an_error_between_claim_and_offset_leaves_the_task_to_reclaim(
    topic: Topic, worker: NewWorker, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "PAUSE_SECONDS", 0.01)
    ids = submitted_in_sql(2)
    topic.wakeup(ids)
    one = worker()
    arm("kafka.before_commit=raise")
    try:
        turn_until(one, 2)
    finally:
        arm()
    assert rows("status, attempt_count, isolated") == [("RETRYING", 0, False)] * 2
    assert effects() == {}
    reclaimed(stack)
    turn_until(one, 2)
    assert effects() == dict.fromkeys(ids, 1)


@pytest.mark.guarantee
def test_a_long_handler_stays_in_the_consumer_group(
    topic: Topic, worker: NewWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A consumer that does not poll for max.poll.interval.ms is removed, so a second thread polls."""
    options = {"session.timeout.ms": "2000", "heartbeat.interval.ms": "100", "max.poll.interval.ms": "2000"}
    monkeypatch.setenv("KAFKA_OPTIONS", json.dumps(options))
    monkeypatch.setattr(intake_module, "KEEP_SECONDS", 0.1)
    settings.current.cache_clear()
    one = worker()
    slow = threading.Event()

    def takes_long(each: Any, db: Any) -> None:
        insert(each, db)
        slow.wait(2.7)

    SCRIPTS["long"] = takes_long
    ids = submitted_in_sql(1, "test.scripted", json.dumps({"do": "long"}))
    topic.wakeup(ids)
    turn_until(one, 1)
    assert sorted(one.intake.assigned()) == [0, 1, 2]
    more = submitted_in_sql(3)
    for partition, id_ in enumerate(more):
        topic.wakeup([id_], partition)
    with caplog.at_level(logging.INFO):
        turn_until(one, 3)
        wait_until(lambda: one.turn(0) == 0 and not topic.progress().waiting, "the offsets are committed")
    are_well([*ids, *more])
    assert "revoked" not in caplog.text
    assert "interval" not in caplog.text


@pytest.mark.guarantee
def test_records_of_a_partition_that_moves_to_another_worker_run_once(
    topic: Topic, worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "KEEP_SECONDS", 0.05)
    one = worker()
    wait_until(lambda: one.turn(0.1) == 0 and one.intake.assigned(), "the worker has its partitions")
    ids = submitted_in_sql(6)
    for partition in range(3):
        topic.wakeup(ids[2 * partition : 2 * partition + 2], partition)
    taken: list[uuid.UUID] = []
    while len(taken) < 6:
        taken += one.intake.take(0.2)
    another = worker()
    wait_until(lambda: another.turn(0.05) >= 0 and another.intake.assigned(), "the other worker has some partitions")
    kept = one.intake.waiting()
    assert 0 < len(kept) < 6
    deliver(engine(), taken, owned=one.intake.owned)  # including records of partitions that have moved
    wait_until(
        lambda: one.turn(0.05) + another.turn(0.05) == 0 and not topic.progress().waiting, "all offsets are committed"
    )
    are_well(ids)


def test_the_offset_of_a_task_that_another_worker_runs_is_committed(topic: Topic, worker: NewWorker) -> None:
    (id_,) = scripted(insert)
    claimed([id_])
    topic.wakeup([id_])
    one = worker()
    turn_until(one, 1)
    wait_until(lambda: one.turn(0) == 0 and not topic.progress().waiting, "the offset is committed")
    assert task(id_)["status"] == "RUNNING"
    assert effects() == {}


@pytest.mark.usefixtures("ledger")
@pytest.mark.parametrize("transactional", [True, False])
def test_a_signal_interrupts_a_handler_inside_or_outside_a_transaction(transactional: bool) -> None:
    stopping: Any = Worker(engine(), None)  # type: ignore[arg-type]
    stopping.stopped.set()

    def outside(_task: Any) -> None:
        stopping.stop(signal.SIGTERM, inspect.currentframe())

    def inside(each: Any, _db: Any) -> None:
        outside(each)

    with handled("test.stop", inside if transactional else outside, transactional=transactional):
        ids = submitted_in_sql(2, "test.stop")
        with pytest.raises(WorkerStops):
            deliver(engine(), ids)
    assert rows() == [("QUEUED", 0)] * 2


@pytest.mark.usefixtures("ledger")
def test_a_signal_interrupts_async_handlers_that_all_wait() -> None:
    """No code of a handler is being executed then: the event loop waits for a socket or a timer."""
    stopping: Any = Worker(engine(), None)  # type: ignore[arg-type]
    stopping.stopped.set()
    both_wait = threading.Barrier(3)

    async def wait_for_long(_task: Any) -> None:
        asyncio.get_running_loop().run_in_executor(None, both_wait.wait, 20)
        await asyncio.sleep(20)

    def send_signal() -> None:
        both_wait.wait(20)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, stopping.stop)
    try:
        with handled("test.stop", wait_for_long):
            ids = submitted_in_sql(2, "test.stop")
            threading.Thread(target=send_signal).start()
            with pytest.raises(WorkerStops):
                deliver(engine(), ids)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert rows() == [("QUEUED", 0)] * 2
