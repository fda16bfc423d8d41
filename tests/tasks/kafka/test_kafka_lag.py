"""Lost wake-ups are sent again; wake-ups that still wait in the topic are not, however slow their partition is."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
from confluent_kafka import KafkaError, TopicPartition

import settings
from checks.kafka import check
from checks.result import Level
from models.engine import engine
from models.errors import Unreachable
from models.sql import sql
from tasks import ticks
from tasks.core.registry import handlers
from tasks.kafka import lag
from tasks.kafka.client import make_consumer
from tasks.kafka.lag import Memory, Progress
from tasks.operations.task_details import read_details
from tasks.operations.why_waiting import ReasonCode, read_queue, reasons
from tasks.recovery.lost_wakeups import repair
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import are_well, claimed
from tests.tasks.kafka.conftest import NewWorker
from tests.tasks.kafka.topic import Topic, submitted_in_sql, turn_until
from tests.tasks.registrations import registered

GRACE = 10  # seconds, the default


def sent(count: int = 1) -> list[uuid.UUID]:
    """Submit tasks whose wake-ups have left the outbox and are lost, unless the test puts them into the topic."""
    ids = submitted_in_sql(count)
    with engine().begin() as connection:
        connection.execute(sql("DELETE FROM ledger.outbox_event"))
    return ids


def looked(memory: Memory) -> int:
    def fail(_queues: object) -> dict[str, int]:
        raise AssertionError("Celery's broker must not be asked")

    return repair(engine(), settings.current(), depths=fail, lost=memory.lost)


@pytest.mark.guarantee
def test_the_tick_sends_a_lost_wakeup_again_and_the_task_runs_once(
    topic: Topic, worker: NewWorker, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lag, "_memory", Memory())
    ids = sent(3)
    assert ticks.run("reclaim")["wokenAgain"] == 0  # within the grace period
    move(stack, GRACE + 1)
    assert ticks.run("reclaim")["wokenAgain"] == 3
    turn_until(worker(), 3)
    are_well(ids)


@pytest.mark.guarantee
def test_a_wakeup_in_a_slow_partition_is_not_sent_again_when_later_ones_overtake_it(
    topic: Topic, stack: ServersOfTests
) -> None:
    memory = Memory()
    topic.wakeup(sent(5), partition=1)
    move(stack, 1)
    later = sent()
    one_by_one = {name: replace(handler, batch=1) for name, handler in handlers().items()}
    assert [task.id for task in claimed(later, handlers=one_by_one, lease_seconds=6000).tasks] == later
    for _ in range(3):
        assert looked(memory) == 0
        move(stack, 10 * GRACE)
    in_one_order = repair(engine(), settings.current(), depths=lambda queues: dict.fromkeys(queues, 5))
    assert in_one_order == 5, "no wake-up was overtaken, so this proves nothing"


@pytest.mark.guarantee
def test_a_lost_wakeup_is_sent_again_even_if_the_topic_is_never_empty(topic: Topic, stack: ServersOfTests) -> None:
    """It is sent when the group has read everything that was there at the first look."""
    memory = Memory()
    topic.wakeup([uuid.uuid4()] * 10)  # wake-ups of other tasks
    (lost,) = sent()
    move(stack, GRACE + 1)
    assert looked(memory) == 0
    commit(9)
    assert looked(memory) == 0
    topic.wakeup([uuid.uuid4()] * 10)
    commit(10)
    sent()
    assert looked(memory) == 1
    assert woken_ids() == [lost]
    move(stack, GRACE + 1)
    assert looked(memory) == 0  # the later task's wake-up may be behind the second ten


def test_a_recreated_topic_does_not_block_the_search_for_lost_wakeups() -> None:
    then = {0: 1000}
    now = Progress(ends={0: 5}, done={0: 3})
    assert now.was_recreated_since(then)
    assert not now.has_passed(then)
    assert Progress(ends={0: 1001}, done={0: 1000}).has_passed(then)


def test_for_a_group_that_never_committed_all_records_are_waiting(topic: Topic) -> None:
    assert topic.progress() == Progress({0: 0, 1: 0, 2: 0}, {0: 0, 1: 0, 2: 0})
    topic.wakeup([uuid.uuid4()] * 3, partition=2)
    assert topic.progress().waiting == 3


def test_the_reason_why_a_task_waits_comes_from_kafka(topic: Topic, stack: ServersOfTests) -> None:
    (id_,) = sent()
    topic.wakeup([id_])
    assert "waits in the broker's queue, as its only message" in asked(id_)[ReasonCode.WAKEUP_IN_BROKER]
    assert list(asked(id_)) == [ReasonCode.WAKEUP_IN_BROKER]
    commit(1)
    assert list(asked(id_)) == [ReasonCode.WAKEUP_LOST]


def test_an_unreachable_kafka_is_reported(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:65530")
    settings.current.cache_clear()
    with pytest.raises(Unreachable, match="Kafka is unreachable"):
        read_queue("ingest")
    (id_,) = sent()
    assert "Kafka is unreachable" in asked(id_)[ReasonCode.BROKER_UNREACHABLE]


def test_the_check_counts_waiting_records_and_reports_a_missing_topic(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.wakeup([uuid.uuid4()] * 2)
    registered(handlers(), topic=topic.name)
    (found,) = check(settings.current())
    assert (found.level, "has 3 partitions, 2 messages wait" in found.message) == (Level.OK, True)
    topic.cluster.fail_topic(topic.name, KafkaError.UNKNOWN_TOPIC_OR_PART)
    (found,) = check(settings.current())
    topic.cluster.fail_topic(topic.name, 0)
    assert (found.level, found.remedy) == (Level.FAIL, "create it, or correct KAFKA_TOPIC")
    monkeypatch.setenv("INGEST_QUEUE", "celery")
    settings.current.cache_clear()
    assert list(check(settings.current())) == []


def asked(task: uuid.UUID) -> dict[ReasonCode, str]:
    with engine().connect() as connection:
        found = read_details(connection, task)
    return {each.code: each.message for each in reasons(found, settings.current(), known_types=handlers())}


def commit(offset: int) -> None:
    """Commit an offset of the first partition, as a worker would."""
    consumer = make_consumer(settings.current())
    consumer.commit(offsets=[TopicPartition(settings.current().kafka_topic, 0, offset)], asynchronous=False)
    consumer.close()


def woken_ids() -> list[uuid.UUID]:
    with engine().begin() as connection:
        payloads = connection.execute(sql("SELECT payload FROM ledger.outbox_event ORDER BY id")).scalars()
        return [uuid.UUID(one) for payload in payloads for one in payload["ids"]]
