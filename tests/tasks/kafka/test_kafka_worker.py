"""A record is Kafka's until the guard has committed, and the ledger's from there: delivered twice, run once."""

from __future__ import annotations

import inspect
import json
import logging
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
from outbox.after_commit_publisher import submitter
from tasks.core import batch_size
from tasks.execution.deliver import ingest
from tasks.execution.stopping import WorkerStops
from tasks.kafka import intake as intake_module
from tasks.kafka import worker as worker_module
from tasks.kafka.intake import Intake, ids_of
from tasks.kafka.worker import Worker
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import are_well, at_commit, claimed, counted, handled, scripted
from tests.tasks.kafka.conftest import NewWorker
from tests.tasks.kafka.topic import Topic, reclaimed, submitted_in_sql, turn_until
from tests.tasks.work import SCRIPTS, effects, insert, rows, task, wakeups


@pytest.mark.guarantee
def test_the_claim_is_on_the_disk_before_the_offset_is_committed(topic: Topic, worker: NewWorker) -> None:
    """P15 lets claims of transactional handlers be lost in a crash: then Kafka must still know the task."""
    ids = submitted_in_sql(3)
    topic.wakeup(ids)
    shown: list[tuple[str, int]] = []

    def show(connection: Connection) -> None:
        durability = connection.exec_driver_sql("SHOW synchronous_commit").scalar_one()
        shown.append((durability, topic.progress().waiting))

    one = worker()
    with at_commit(engine(), show):
        turn_until(one, 3)
    assert shown[0] == ("on", 3)
    are_well(ids)
    wait_until(lambda: one.turn(0) == 0 and not topic.progress().waiting, "the offsets are committed")


def test_whoever_takes_slow_tasks_takes_no_more_than_it_runs(topic: Topic, worker: NewWorker) -> None:
    """Or it would wake-up anew for all the others each time: for 60 tasks, 1,770 times."""
    with handled("test.slow", insert) as slow:
        ids = submitted_in_sql(60, "test.slow")
        before = len(wakeups())
        topic.wakeup(ids)
        one = worker()

        def turn() -> bool:
            batch_size._seconds[slow.type] = 1.0
            one.turn(0.2)
            assert submitter().flush(10)
            return set(rows("status")) == {("SUCCEEDED",)}

        wait_until(turn, "all have succeeded")
    assert effects() == dict.fromkeys(ids, 1)
    assert len(wakeups()) - before <= len(ids)


def test_ids_of_many_records_are_claimed_together_and_each_kind_by_itself(topic: Topic, worker: NewWorker) -> None:
    one = worker()
    wait_until(lambda: one.turn(0.1) == 0 and one.intake.assigned(), "it has its partitions")
    inserts, many = submitted_in_sql(20), submitted_in_sql(20, "test.many")
    topic.wakeup([id_ for pair in zip(inserts, many, strict=True) for id_ in pair])
    turn_until(one, 40)
    are_well([*inserts, *many])
    claims = {at for (at,) in rows("updated_at", "true")}
    assert len(claims) <= 4  # two, unless a fetch came between


@pytest.mark.parametrize(
    "value", [b"", b"not JSON", b"{}", b'{"ids": 7}', b'{"ids": []}', b'{"ids": ["no id"]}', b"\xff", b"[" * 100_000]
)
def test_what_is_no_wakeup_names_nobody_and_is_counted(value: bytes) -> None:
    before = counted()["skipped"]
    assert ids_of(value) == []
    assert counted()["skipped"] == before + 1


@pytest.mark.guarantee
def test_a_poisoned_record_is_counted_and_passed_over_and_holds_up_nobody(
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
    assert f"{topic.name}/0/1 names no task" in caplog.text
    assert "canary" not in caplog.text
    wait_until(lambda: one.turn(0) == 0 and not topic.progress().waiting, "the offsets are committed")


def test_poison_alone_does_not_stay_at_the_head_of_its_partition(topic: Topic, worker: NewWorker) -> None:
    topic.put(b"no")
    one = worker()
    wait_until(lambda: one.turn(0.1) == 0 and not topic.progress().waiting, "its offset is committed")
    assert topic.progress().ends[0] == 1


@pytest.mark.guarantee
def test_a_record_that_comes_to_two_workers_at_once_is_run_once(
    topic: Topic, worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups are given everything twice, as after a rebalance that cost a commit."""
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


def test_a_type_that_nobody_knows_is_woken_again_by_the_outbox_and_kafka_may_forget_it(
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
def test_a_ledger_that_is_away_is_waited_for_with_the_records_in_hand(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "PAUSE_SECONDS", 0.01)
    ids = submitted_in_sql(5)
    topic.wakeup(ids)
    away = make_engine(settings.current().database_url)
    refusals = iter(range(3))

    def refuse(*_: Any) -> None:
        if next(refusals, None) is not None:
            raise OperationalError("connect", None, Exception("away"))

    event.listen(away, "do_connect", refuse)
    one = Worker(away, Intake(settings.current()))
    turn_until(one, 5)
    one.intake.close()
    away.dispose()
    assert next(refusals, None) is None, "it was never away"
    are_well(ids)
    assert topic.progress().waiting == 0


def test_a_fault_between_the_claim_and_the_offset_leaves_the_task_to_the_ledger(
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
def test_a_long_handler_keeps_its_place_in_the_group(
    topic: Topic, worker: NewWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever does not poll for max.poll.interval.ms is thrown out: a thread polls meanwhile."""
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
    assert "given up" not in caplog.text
    assert "interval" not in caplog.text


@pytest.mark.guarantee
def test_a_partition_that_goes_to_another_worker_is_let_go_and_its_records_run_once(
    topic: Topic, worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "KEEP_SECONDS", 0.05)
    one = worker()
    wait_until(lambda: one.turn(0.1) == 0 and one.intake.assigned(), "it has its partitions")
    ids = submitted_in_sql(6)
    for partition in range(3):
        topic.wakeup(ids[2 * partition : 2 * partition + 2], partition)
    in_hand: list[uuid.UUID] = []
    while len(in_hand) < 6:
        in_hand += one.intake.take(0.2)
    another = worker()
    wait_until(lambda: another.turn(0.05) >= 0 and another.intake.assigned(), "another has some")
    kept = one.intake.waiting()
    assert 0 < len(kept) < 6
    ingest(engine(), in_hand, owned=one.intake.owned)  # all that it had taken, its own or not
    wait_until(
        lambda: one.turn(0.05) + another.turn(0.05) == 0 and not topic.progress().waiting, "all offsets are committed"
    )
    are_well(ids)


def test_a_task_that_somebody_else_runs_is_not_kafkas_any_more(topic: Topic, worker: NewWorker) -> None:
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
def test_a_signal_ends_the_running_handler_whatever_its_kind(transactional: bool) -> None:
    stopping: Any = Worker(engine(), None)  # type: ignore[arg-type]
    stopping.stopped.set()

    def outside(_task: Any) -> None:
        stopping.stop(signal.SIGTERM, inspect.currentframe())

    def inside(each: Any, _db: Any) -> None:
        outside(each)

    with handled("test.stop", inside if transactional else outside, transactional=transactional):
        ids = submitted_in_sql(2, "test.stop")
        with pytest.raises(WorkerStops):
            ingest(engine(), ids)
    assert rows() == [("QUEUED", 0)] * 2
