"""Publishers to Redis."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from outbox.publishers.celery import CeleryPublisher
from outbox.publishers.redis_stream import RedisStreamPublisher
from tests.outbox.publishers.case import Case, stopped
from tests.servers import ServersOfTests


@pytest.fixture
def redis_stream(stack: ServersOfTests) -> Iterator[Case]:
    url = stack.addresses["REDIS_URL"]

    def arrived() -> list[Any]:
        with redis.Redis.from_url(url, decode_responses=True) as client:
            return [json.loads(fields["payload"])["ids"][0] for _, fields in client.xrange("orders")]

    publisher = RedisStreamPublisher(url, "orders")
    yield Case(
        publisher,
        lambda: RedisStreamPublisher("redis://127.0.0.1:1/0", "orders"),
        lambda: stopped(stack.running["redis-receipts"].process),
        arrived,
    )
    publisher.close()


@pytest.fixture
def celery(stack: ServersOfTests) -> Iterator[Case]:
    url = stack.addresses["BROKER_URL"]

    def arrived() -> list[Any]:
        with redis.Redis.from_url(url, decode_responses=True) as client:
            lists = [key for key in client.keys("celeriac:ingest*") if client.type(key) == "list"]
            bodies = [json.loads(message)["body"] for key in lists for message in client.lrange(key, 0, -1)]
        return [one for body in reversed(bodies) for one in json.loads(base64.b64decode(body))[0][0]]

    publisher = CeleryPublisher("ingest", url)
    yield Case(
        publisher,
        lambda: CeleryPublisher("ingest", "redis://127.0.0.1:1/0"),
        lambda: stopped(stack.running["redis-broker"].process),
        arrived,
    )
    publisher.close()
