"""INGEST_QUEUE=kafka: wake-ups go to the topic with ids only, and no wake-up is lost while Kafka is unreachable."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from confluent_kafka import KafkaError

import settings
from models.engine import engine
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from outbox.circuit import Circuits
from outbox.publishers import contract
from outbox.relay import Relay
from settings import SettingsError
from tests.outbox.ledger import insert, move, rows, woken
from tests.servers import ServersOfTests
from tests.tasks.command_line import manage
from tests.tasks.deliveries import are_well, submitted
from tests.tasks.kafka.conftest import NewWorker
from tests.tasks.kafka.topic import Topic, turn_until

OBSERVE = sql("""
    SELECT id,status,attempt_count,next_retry_at,last_error,created_at,sent_at
    FROM ledger.outbox_event
    ORDER BY created_at DESC
    LIMIT 20
""")


def relayed() -> tuple[int, int, int]:
    relay = Relay.of(settings.current())
    try:
        ticked = relay.tick()
        return ticked.sent, ticked.failed, ticked.dead
    finally:
        relay.close()


@pytest.mark.guarantee
def test_a_record_contains_only_ids_and_a_batch_of_tasks_is_one_record(topic: Topic, worker: NewWorker) -> None:
    ids = submitted(3, payload={"secret": "canary"})
    assert after_commit_publisher().wait_until_idle(10)
    assert topic.values() == [{"ids": [str(one) for one in ids]}]
    assert b"canary" not in b"".join(record.value() or b"" for record in topic.cluster.records(topic.name))
    assert rows("destination, status") == [("celery:ingest", "SENT")]
    turn_until(worker(), 3)
    are_well(ids)


def test_dead_letters_still_go_to_the_broker_of_celery(topic: Topic, stack: ServersOfTests) -> None:
    with engine().begin() as connection:
        insert_letter = sql("""INSERT INTO ledger.outbox_event (destination, payload) VALUES
            ('celery:ingest.dlq', '{"dead": "01977a4e-8d6b-7c3e-9f51-3b1c8e2a4d60"}')""")
        connection.execute(insert_letter)
    assert relayed() == (1, 0, 0)
    assert topic.values() == []
    assert len(woken(stack, "ingest.dlq")) == 1


def test_an_event_that_is_not_a_wakeup_and_an_unknown_queue_are_refused(topic: Topic) -> None:
    insert("celery:nowhere")
    with engine().begin() as connection:
        connection.execute(sql("INSERT INTO ledger.outbox_event (destination, payload) VALUES ('celery:ingest', '{}')"))
    assert relayed() == (0, 0, 2)
    (nowhere,), (none,) = rows("last_error")
    assert "INGEST_QUEUES" in nowhere
    assert "The event is not a wake-up" in none


def test_wakeups_from_before_the_switch_are_published_to_kafka(topic: Topic) -> None:
    """The destination in the outbox is the same for Celery and Kafka."""
    insert("celery:ingest", 5)
    assert relayed() == (5, 0, 0)
    assert len(topic.values()[0]["ids"]) == 5


def test_a_missing_topic_is_named_in_the_error_and_no_wakeup_is_lost(topic: Topic) -> None:
    topic.cluster.fail_topic(topic.name, KafkaError.UNKNOWN_TOPIC_OR_PART)
    try:
        insert("celery:ingest")
        assert relayed() == (0, 1, 0)
        ((status, error),) = rows("status, last_error")
        assert status == "RETRYING"
        assert "create it, or correct KAFKA_TOPIC" in error
    finally:
        topic.cluster.fail_topic(topic.name, 0)


@pytest.mark.guarantee
def test_a_wakeup_for_a_dead_port_is_retried_then_dead_and_its_tasks_run_when_kafka_is_reachable(
    topic: Topic, worker: NewWorker, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:65530")
    monkeypatch.setenv("OUTBOX_MAX_ATTEMPTS", "3")
    monkeypatch.setenv("OUTBOX_RETRY_JITTER", "0")
    monkeypatch.setattr(contract, "PATIENCE_SECONDS", 0.2)
    settings.current.cache_clear()
    ids = submitted(2)
    assert after_commit_publisher().wait_until_idle(10)
    clock = 0.0
    relay = Relay.of(settings.current())
    relay.circuits = Circuits(lambda: clock)
    seen: list[Any] = []
    for _ in range(4):
        relay.tick()
        with engine().begin() as connection:
            (event,) = connection.execute(OBSERVE).all()
        seen.append(event)
        clock += 100
        move(stack, 100)
    relay.close()
    assert [event.attempt_count for event in seen] == [1, 2, 3, 3]
    assert [event.status for event in seen] == ["RETRYING", "RETRYING", "DEAD", "DEAD"]
    assert [event.next_retry_at for event in seen[2:]] == [None, None]
    assert all("Kafka is unreachable" in event.last_error and event.sent_at is None for event in seen)
    waits = [event.next_retry_at for event in seen[:2]]
    assert waits == sorted(set(waits))
    assert all(isinstance(wait, datetime) for wait in waits)

    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", topic.cluster.bootstrap_servers)
    monkeypatch.setattr(contract, "PATIENCE_SECONDS", 3.0)
    settings.current.cache_clear()
    assert relayed() == (1, 0, 0)
    turn_until(worker(), 2)
    are_well(ids)


def test_a_rejected_kafka_option_is_named_without_its_value_and_no_wakeup_is_lost(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_OPTIONS", '{"nonsense": "canary"}')
    settings.current.cache_clear()
    insert("celery:ingest")
    assert relayed() == (0, 1, 0)
    ((status, error),) = rows("status, last_error")
    assert status == "RETRYING"
    assert "correct nonsense" in error
    assert "canary" not in error
    done = manage("kafka-worker")
    assert (done.code, done.out) == (1, "")
    assert "KAFKA_OPTIONS: the Kafka client rejects them: correct nonsense." in done.err
    assert "canary" not in done.err


def test_a_kafka_worker_refuses_to_start_while_wakeups_go_to_celery(stack: ServersOfTests) -> None:
    assert "INGEST_QUEUE" in manage("kafka-worker").err


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"INGEST_QUEUE": "kafka"}, "KAFKA_BOOTSTRAP_SERVERS"),
        ({"KAFKA_BOOTSTRAP_SERVERS": "kafka://user:secret@host:9092"}, "KAFKA_BOOTSTRAP_SERVERS"),
        ({"KAFKA_TOPIC": "two words"}, "KAFKA_TOPIC"),
        ({"KAFKA_GROUP": ""}, "KAFKA_GROUP"),
        ({"KAFKA_OPTIONS": "sasl.password=secret"}, "KAFKA_OPTIONS"),
    ],
)
def test_an_invalid_setting_is_named_and_its_value_is_not_shown(
    variables: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings.current.cache_clear()
    with pytest.raises(SettingsError, match=named) as error:
        settings.current()
    assert "secret" not in str(error.value)
    monkeypatch.undo()
    settings.current.cache_clear()
