"""Publishers to Kafka."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from outbox.publishers import contract
from outbox.publishers.kafka import KafkaPublisher
from outbox.publishers.kafka_wakeups import KafkaWakeups
from tests.nodes.kafka import PRODUCE, KafkaCluster
from tests.outbox.publishers.case import Case

_numbers: Final = itertools.count()


@pytest.fixture(scope="session")
def kafka_cluster() -> Iterator[KafkaCluster]:
    """A cluster of three brokers for the whole run."""
    cluster = KafkaCluster()
    yield cluster
    cluster.end()


@pytest.fixture(scope="session")
def kafka_publisher(kafka_cluster: KafkaCluster) -> Iterator[KafkaPublisher]:
    """One publisher for the whole run: a new producer waits for half a second before it asks for its id."""
    publisher = KafkaPublisher(kafka_cluster.bootstrap_servers, "none yet")
    yield publisher
    publisher.close()


@pytest.fixture
def kafka_topic(kafka_cluster: KafkaCluster) -> str:
    """A new topic of three partitions."""
    name = f"orders-{next(_numbers)}"
    kafka_cluster.make_topic(name, partitions=3)
    return name


@pytest.fixture
def kafka(kafka_cluster: KafkaCluster, kafka_publisher: KafkaPublisher, kafka_topic: str) -> Iterator[Case]:
    def arrived() -> list[Any]:
        return [json.loads(record.value() or b"")["ids"][0] for record in kafka_cluster.records(kafka_topic)]

    kafka_publisher.topic = kafka_topic
    yield Case(
        kafka_publisher,
        lambda: KafkaPublisher("127.0.0.1:1", kafka_topic),
        kafka_cluster.stopped,
        arrived,
        keeps_order=False,  # there is no order between partitions
    )
    kafka_cluster.fail_requests(PRODUCE, [])


@pytest.fixture
def kafka_wakeups(kafka_cluster: KafkaCluster, kafka: Case, kafka_topic: str, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A publisher of wake-ups, several per record. Its patience is shortened; the test of `kafka` covers it."""
    monkeypatch.setattr(contract, "PATIENCE_SECONDS", 1.5)

    def arrived() -> list[Any]:
        return [
            one for record in kafka_cluster.records(kafka_topic) for one in json.loads(record.value() or b"")["ids"]
        ]

    def wakeups(publisher: Any) -> KafkaWakeups:
        return KafkaWakeups("ingest", publisher, queues=("ingest",))

    return Case(
        wakeups(kafka.publisher), lambda: wakeups(kafka.unreachable()), kafka.hanging, arrived, keeps_order=False
    )
