"""The topic of a test: put records into it, read them, and see how far the group has read."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from confluent_kafka import Producer

import settings
from models.engine import engine
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import ticks
from tasks.kafka.lag import Progress, progress
from tasks.kafka.worker import Worker
from tests.nodes.kafka import KafkaCluster
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until


class Topic:
    """One topic of a cluster."""

    def __init__(self, cluster: KafkaCluster, name: str, stack: ServersOfTests) -> None:
        self.cluster = cluster
        self.name = name
        self.stack = stack

    def put(self, *values: bytes, partition: int = 0) -> None:
        """Put raw values into the topic."""
        producer = Producer({"bootstrap.servers": self.cluster.bootstrap_servers})
        for value in values:
            producer.produce(self.name, value, partition=partition)
        assert producer.flush(5) == 0
        producer.close()

    def wakeup(self, ids: Sequence[uuid.UUID], partition: int = 0) -> None:
        """Put one wake-up for each task into the topic."""
        self.put(*(json.dumps({"ids": [str(one)]}).encode() for one in ids), partition=partition)

    def wakeup_together(self, ids: Sequence[uuid.UUID]) -> None:
        """Put one wake-up for all tasks into the topic."""
        self.put(json.dumps({"ids": [str(one) for one in ids]}).encode())

    def values(self) -> list[Any]:
        return [json.loads(record.value() or b"") for record in self.cluster.records(self.name)]

    def progress(self) -> Progress:
        return progress(settings.current())


def submitted_in_sql(count: int = 1, type: str = "test.insert", payload: str = "{}") -> list[uuid.UUID]:
    """Submit tasks without publishing their wake-ups: they stay in the outbox, since no relay runs."""
    submit = sql("SELECT ledger.ingest_submit(:type, CAST(:payload AS jsonb)) FROM generate_series(1, :n)")
    with engine().begin() as connection:
        return list(connection.execute(submit, {"type": type, "payload": payload, "n": count}).scalars())


def turn_until(worker: Worker, ids: int, *, seconds: float = 20) -> None:
    """Run the worker until it has taken this many ids."""
    taken = 0

    def done() -> bool:
        nonlocal taken
        taken += worker.turn(0.2)
        return taken >= ids

    wait_until(done, f"{ids} ids were taken", seconds=seconds)


def reclaimed(stack: ServersOfTests) -> None:
    """Reclaim the tasks of lost workers and send their wake-ups. The first look extends every lease once."""
    for seconds in (61, 59, 2):
        move(stack, seconds)
        ticks.run("reclaim")
    move(stack, 5)
    ticks.run("relay")
    assert after_commit_publisher().wait_until_idle(10)
