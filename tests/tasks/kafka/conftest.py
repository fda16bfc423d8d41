"""One Kafka broker for the run, a topic and a group for each test, and INGEST_QUEUE=kafka in this process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Final

import pytest

import settings
from models.engine import engine
from tasks.kafka.intake import Intake
from tasks.kafka.worker import Worker
from tests.nodes.kafka import KafkaCluster
from tests.servers import ServersOfTests
from tests.tasks.deliveries import clean_sink
from tests.tasks.kafka.topic import Topic
from tests.tasks.registrations import no_worker_processes

PARTITIONS: Final = 3
_numbers: Final = itertools.count()

NewWorker = Callable[..., Worker]


@pytest.fixture(scope="session")
def cluster() -> Iterator[KafkaCluster]:
    cluster = KafkaCluster(1)
    yield cluster
    cluster.end()


@pytest.fixture
def topic(cluster: KafkaCluster, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[Topic]:
    """Create an unused topic. Sessions are short, so that the partitions of a dead worker move soon."""
    name = f"ingest.tasks-{next(_numbers)}"
    cluster.make_topic(name, partitions=PARTITIONS)
    monkeypatch.setenv("INGEST_QUEUE", "kafka")
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", cluster.bootstrap_servers)
    monkeypatch.setenv("KAFKA_TOPIC", name)
    monkeypatch.setenv("KAFKA_GROUP", f"group of {name}")
    monkeypatch.setenv("KAFKA_OPTIONS", json.dumps({"session.timeout.ms": "500", "heartbeat.interval.ms": "100"}))
    settings.current.cache_clear()
    with clean_sink(), no_worker_processes():
        yield Topic(cluster, name, stack)


@pytest.fixture
def worker(topic: Topic) -> Iterator[NewWorker]:
    """Create workers in this process; they are closed at the end of the test."""
    made: list[Worker] = []

    def new() -> Worker:
        made.append(one := Worker(engine(), Intake(settings.current())))
        return one

    yield new
    for one in made:
        one.intake.close()
