"""The broker functions give the same answers on Redis and on RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery

from models.errors import Unreachable
from tasks import broker
from tests.servers import ServersOfTests
from tests.tasks.held import Held


@pytest.fixture
def asked(celery_setup: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    app: Celery = celery_setup.app
    monkeypatch.setattr(broker, "app", app)
    broker._look._reset()
    celery_setup.worker.container.kill()  # it would take the messages
    yield app
    broker._look().close()
    broker._look._reset()


def test_waiting_messages_are_counted_by_queue_and_can_be_purged(asked: Celery, held: Held) -> None:
    for priority in (0, 5, 9):
        asked.send_task("tests.hold", args=[str(held.folder), 0], priority=priority)
    assert broker.depths(["ingest", "never.declared"]) == {"ingest": 3, "never.declared": 0}
    assert [broker.is_empty(queue) for queue in ("ingest", "never.declared")] == [False, True]
    assert broker.purge("ingest") == 3
    assert broker.purge("never.declared") == 0
    assert broker.depths(["ingest"]) == {"ingest": 0}
    assert broker.is_empty("ingest")


def test_asking_for_many_queues_takes_no_more_connections_than_for_one(stack: ServersOfTests) -> None:
    """Each scrape of /metrics asks for all queues."""

    def connections(queues: int) -> int:
        with redis.Redis.from_url(stack.addresses["BROKER_URL"]) as client:
            before = client.info("stats")["total_connections_received"]
            broker.depths([f"queue.{number}" for number in range(queues)])
            return int(client.info("stats")["total_connections_received"] - before)

    assert connections(5) == connections(1)


def test_an_unreachable_broker_is_reported_without_a_driver_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "app", Celery(broker="redis://127.0.0.1:1/0", set_as_current=False))
    with pytest.raises(Unreachable, match="does not answer"):
        broker.depths(["ingest"])
