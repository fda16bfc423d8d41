"""Every publisher keeps the contract of `outbox/publishers/contract.py`, against its real server."""

from __future__ import annotations

import base64
import json
import signal
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
import redis

from embedded.process import Process
from outbox.lease import ClaimedEvent
from outbox.publishers.celery import CeleryPublisher
from outbox.publishers.contract import DestinationDown, Failed, Publisher, Refused, Sent
from outbox.publishers.redis_stream import RedisStreamPublisher
from tests.servers import ServersOfTests


@dataclass
class Case:
    """A publisher, its real server, and what has arrived there."""

    publisher: Publisher
    unreachable: Callable[[], Publisher]
    server: Process
    arrived: Callable[[], list[Any]]


def redis_stream(stack: ServersOfTests) -> Case:
    url = stack.addresses["REDIS_URL"]

    def arrived() -> list[Any]:
        with redis.Redis.from_url(url, decode_responses=True) as client:
            return [json.loads(fields["payload"])["ids"][0] for _, fields in client.xrange("orders")]

    return Case(
        RedisStreamPublisher(url, "orders"),
        lambda: RedisStreamPublisher("redis://127.0.0.1:1/0", "orders"),
        stack.running["redis-receipts"].process,
        arrived,
    )


def celery(stack: ServersOfTests) -> Case:
    url = stack.addresses["BROKER_URL"]

    def arrived() -> list[Any]:
        with redis.Redis.from_url(url, decode_responses=True) as client:
            lists = [key for key in client.keys("celeriac:ingest*") if client.type(key) == "list"]
            bodies = [json.loads(message)["body"] for key in lists for message in client.lrange(key, 0, -1)]
        return [one for body in reversed(bodies) for one in json.loads(base64.b64decode(body))[0][0]]

    return Case(
        CeleryPublisher("ingest", url),
        lambda: CeleryPublisher("ingest", "redis://127.0.0.1:1/0"),
        stack.running["redis-broker"].process,
        arrived,
    )


@pytest.fixture(params=[celery, redis_stream], ids=lambda make: str(make.__name__))
def case(request: pytest.FixtureRequest, stack: ServersOfTests) -> Iterator[Case]:
    case: Case = request.param(stack)
    yield case
    case.publisher.close()


def events(*names: str) -> list[ClaimedEvent]:
    return [
        ClaimedEvent(n, "d", {"type": "t", "ids": [name], "batch": 100}, None, {}, 0, uuid.uuid4(), datetime.now(UTC))
        for n, name in enumerate(names, start=1)
    ]


def test_what_is_reported_as_sent_has_arrived_once_and_in_order(case: Case) -> None:
    names = [f"event {n}" for n in range(250)]
    results = case.publisher.publish(events(*names))
    assert [type(result) for result in results] == [Sent] * 250
    assert case.arrived() == names


def test_text_of_any_language_arrives_as_it_was(case: Case) -> None:
    case.publisher.publish(events("naïve 任务 🥬 \\ \" '"))
    assert case.arrived() == ["naïve 任务 🥬 \\ \" '"]


def test_a_server_that_refuses_connections_is_down(case: Case) -> None:
    publisher = case.unreachable()
    with pytest.raises(DestinationDown):
        publisher.publish(events("lost"))
    publisher.close()


def test_a_server_that_hangs_is_down_after_a_few_seconds_and_can_be_used_again(case: Case) -> None:
    case.publisher.publish(events("before"))
    case.server.ask_to_end(signal.SIGSTOP)
    try:
        with pytest.raises(DestinationDown):
            case.publisher.publish(events("while it hangs"))
    finally:
        case.server.ask_to_end(signal.SIGCONT)
    assert [type(result) for result in case.publisher.publish(events("after"))] == [Sent]
    assert {"before", "after"} <= set(case.arrived())


def test_a_closed_publisher_opens_again(case: Case) -> None:
    case.publisher.close()
    assert [type(result) for result in case.publisher.publish(events("again"))] == [Sent]


def test_a_bad_event_costs_its_neighbours_nothing(stack: ServersOfTests) -> None:
    case = celery(stack)
    good, bad = events("good")[0], ClaimedEvent(2, "d", {"no": "ring"}, None, {}, 0, uuid.uuid4(), datetime.now(UTC))
    assert [type(result) for result in case.publisher.publish([bad, good, bad])] == [Refused, Sent, Refused]
    assert case.arrived() == ["good"]
    case.publisher.close()


def test_a_stream_that_is_something_else_fails_each_event(stack: ServersOfTests) -> None:
    case = redis_stream(stack)
    with redis.Redis.from_url(stack.addresses["REDIS_URL"]) as client:
        client.set("orders", "no stream")
    (result,) = case.publisher.publish(events("one"))
    assert isinstance(result, Failed)
    assert "WRONGTYPE" in result.error
    case.publisher.close()
