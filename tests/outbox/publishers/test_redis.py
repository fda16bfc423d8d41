"""The publishers to Redis."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

import redis

from outbox.lease import ClaimedEvent
from outbox.publishers.contract import Failed, Refused, Sent
from tests.outbox.publishers.case import Case, events
from tests.servers import ServersOfTests


def test_a_bad_wakeup_is_refused_and_the_others_arrive(celery: Case) -> None:
    good, bad = (
        events("good")[0],
        ClaimedEvent(2, "d", {"not": "a wake-up"}, None, {}, 0, uuid.uuid4(), datetime.now(UTC)),
    )
    assert [type(result) for result in celery.publisher.publish([bad, good, bad])] == [Refused, Sent, Refused]
    assert celery.arrived() == ["good"]


def test_events_fail_if_the_key_of_the_stream_has_another_type(redis_stream: Case, stack: ServersOfTests) -> None:
    with redis.Redis.from_url(stack.addresses["REDIS_URL"]) as client:
        client.set("orders", "not a stream")
    (result,) = redis_stream.publisher.publish(events("one"))
    assert isinstance(result, Failed)
    assert "WRONGTYPE" in result.error
