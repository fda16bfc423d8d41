"""What only the publishers on Redis do."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

import redis

from outbox.lease import ClaimedEvent
from outbox.publishers.contract import Failed, Refused, Sent
from tests.outbox.publishers.case import Case, events
from tests.servers import ServersOfTests


def test_a_bad_wakeup_costs_its_neighbours_nothing(celery: Case) -> None:
    good, bad = events("good")[0], ClaimedEvent(2, "d", {"no": "wake-up"}, None, {}, 0, uuid.uuid4(), datetime.now(UTC))
    assert [type(result) for result in celery.publisher.publish([bad, good, bad])] == [Refused, Sent, Refused]
    assert celery.arrived() == ["good"]


def test_a_stream_that_is_something_else_fails_each_event(redis_stream: Case, stack: ServersOfTests) -> None:
    with redis.Redis.from_url(stack.addresses["REDIS_URL"]) as client:
        client.set("orders", "no stream")
    (result,) = redis_stream.publisher.publish(events("one"))
    assert isinstance(result, Failed)
    assert "WRONGTYPE" in result.error
