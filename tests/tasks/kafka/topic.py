"""The topic of a test: what is put into it by hand, what is in it, and how far the group has come."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from confluent_kafka import Producer

import settings
from models.engine import engine
from models.sql import sql
from outbox.after_commit_publisher import submitter
from tasks import ticks
from tasks.kafka.lag import Progress, progress
from tasks.kafka.worker import Worker
from tests.nodes.kafka import KafkaCluster
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until


class Topic:
    """One of one cluster."""

    def __init__(self, cluster: KafkaCluster, name: str, stack: ServersOfTests) -> None:
        self.cluster = cluster
        self.name = name
        self.stack = stack

    def put(self, *values: bytes, partition: int = 0) -> None:
        """As anybody might."""
        producer = Producer({"bootstrap.servers": self.cluster.bootstrap_servers})
        for value in values:
            producer.produce(self.name, value, partition=partition)
        assert producer.flush(5) == 0
        producer.close()

    def wakeup(self, ids: Sequence[uuid.UUID], partition: int = 0) -> None:
        """One record for each."""
        self.put(*(json.dumps({"ids": [str(one)]}).encode() for one in ids), partition=partition)

    def wakeup_together(self, ids: Sequence[uuid.UUID]) -> None:
        """One record for all."""
        self.put(json.dumps({"ids": [str(one) for one in ids]}).encode())

    def values(self) -> list[Any]:
        return [json.loads(record.value() or b"") for record in self.cluster.records(self.name)]

    def progress(self) -> Progress:
        return progress(settings.current())


def submitted_in_sql(count: int = 1, type: str = "test.insert", payload: str = "{}") -> list[uuid.UUID]:
    """Their wake-ups wait in the outbox, for a relay that does not run."""
    submit = sql("SELECT ledger.ingest_submit(:type, CAST(:payload AS jsonb)) FROM generate_series(1, :n)")
    with engine().begin() as connection:
        return list(connection.execute(submit, {"type": type, "payload": payload, "n": count}).scalars())


def turn_until(worker: Worker, ids: int, *, seconds: float = 20) -> None:
    """Until it has taken so many."""
    taken = 0

    def done() -> bool:
        nonlocal taken
        taken += worker.turn(0.2)
        return taken >= ids

    wait_until(done, f"{ids} ids were taken, and not only {taken}", seconds=seconds)


def reclaimed(stack: ServersOfTests) -> None:
    """What was lost with its worker is taken over, and woken for. The first look gives everybody one lease more."""
    for seconds in (61, 59, 2):
        move(stack, seconds)
        ticks.run("reclaim")
    move(stack, 5)
    ticks.run("relay")
    assert submitter().flush(10)
