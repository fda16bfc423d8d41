"""Wake-ups that Kafka cannot hold any more are woken again; a million that wait in it are not, however uneven (P8)."""

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
from tasks.operations.task_details import details
from tasks.operations.why_waiting import Why, look, reasons
from tasks.recovery.lost_wakeups import wake_again
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import are_well, claimed
from tests.tasks.kafka.conftest import NewWorker
from tests.tasks.kafka.topic import Topic, submitted_in_sql, turn_until

GRACE = 10  # seconds, the default


def sent(count: int = 1) -> list[uuid.UUID]:
    """Tasks whose wake-ups have left the outbox, wherever they went."""
    ids = submitted_in_sql(count)
    with engine().begin() as connection:
        connection.execute(sql("DELETE FROM ledger.outbox_event"))
    return ids


def looked(memory: Memory) -> int:
    def nobody_is_asked(_queues: object) -> dict[str, int]:
        raise AssertionError("the broker of Celery knows nothing of it")

    return wake_again(engine(), settings.current(), depths=nobody_is_asked, lost=memory.lost)


@pytest.mark.guarantee
def test_a_wakeup_that_is_nowhere_is_woken_again_by_the_tick_and_runs_once(
    topic: Topic, worker: NewWorker, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lag, "_memory", Memory())
    ids = sent(3)
    assert ticks.run("reclaim")["wokenAgain"] == 0  # not yet
    move(stack, GRACE + 1)
    assert ticks.run("reclaim")["wokenAgain"] == 3
    turn_until(worker(), 3)
    are_well(ids)


@pytest.mark.guarantee
def test_what_waits_in_a_slow_partition_is_not_woken_again_though_others_have_overtaken_it(
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
    in_one_order = wake_again(engine(), settings.current(), depths=lambda queues: dict.fromkeys(queues, 5))
    assert in_one_order == 5, "they were not overtaken: nothing is proved"


@pytest.mark.guarantee
def test_a_wakeup_that_was_lost_in_a_topic_that_is_never_empty_is_woken_again(
    topic: Topic, stack: ServersOfTests
) -> None:
    """Once the group has passed all that was there when its loss was first suspected."""
    memory = Memory()
    topic.wakeup([uuid.uuid4()] * 10)  # somebody else's
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
    assert looked(memory) == 0  # the second ten are not passed, and the later one's wake-up may be behind them


def test_the_topic_that_was_made_anew_does_not_hold_up_the_look_for_ever() -> None:
    then = {0: 1000}
    now = Progress(ends={0: 5}, done={0: 3})
    assert now.is_of_another_topic(then)
    assert not now.has_passed(then)
    assert Progress(ends={0: 1001}, done={0: 1000}).has_passed(then)


def test_a_group_that_has_never_committed_has_everything_before_it(topic: Topic) -> None:
    assert topic.progress() == Progress({0: 0, 1: 0, 2: 0}, {0: 0, 1: 0, 2: 0})
    topic.wakeup([uuid.uuid4()] * 3, partition=2)
    assert topic.progress().waiting == 3


def test_why_a_task_waits_is_asked_of_kafka_and_workers_that_cannot_answer_are_not_missed(
    topic: Topic, stack: ServersOfTests
) -> None:
    (id_,) = sent()
    topic.wakeup([id_])
    assert "waits in the broker's queue, as its only message" in asked(id_)[Why.WAKEUP_IN_BROKER]
    assert list(asked(id_)) == [Why.WAKEUP_IN_BROKER]
    commit(1)
    assert list(asked(id_)) == [Why.WAKEUP_LOST]


def test_a_kafka_that_is_away_is_said(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:65530")
    settings.current.cache_clear()
    with pytest.raises(Unreachable, match="Kafka does not answer"):
        look("ingest")
    (id_,) = sent()
    assert "Kafka does not answer" in asked(id_)[Why.BROKER_UNREACHABLE]


def test_the_doctor_counts_what_waits_and_misses_a_topic_that_is_not_there(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.wakeup([uuid.uuid4()] * 2)
    (found,) = check(settings.current())
    assert (found.level, "has 3 partitions, 2 messages wait" in found.message) == (Level.OK, True)
    topic.cluster.fail_topic(topic.name, KafkaError.UNKNOWN_TOPIC_OR_PART)
    (found,) = check(settings.current())
    topic.cluster.fail_topic(topic.name, 0)
    assert (found.level, found.remedy) == (Level.FAIL, "create it, or correct KAFKA_TOPIC")
    monkeypatch.setenv("INGEST_QUEUE", "celery")
    settings.current.cache_clear()
    assert list(check(settings.current())) == []


def asked(task: uuid.UUID) -> dict[Why, str]:
    with engine().connect() as connection:
        found = details(connection, task)
    return {each.code: each.message for each in reasons(found, settings.current(), known_types=handlers())}


def commit(offset: int) -> None:
    """As the group of the workers would, in the first partition."""
    consumer = make_consumer(settings.current())
    consumer.commit(offsets=[TopicPartition(settings.current().kafka_topic, 0, offset)], asynchronous=False)
    consumer.close()


def woken_ids() -> list[uuid.UUID]:
    with engine().begin() as connection:
        payloads = connection.execute(sql("SELECT payload FROM ledger.outbox_event ORDER BY id")).scalars()
        return [uuid.UUID(one) for payload in payloads for one in payload["ids"]]
