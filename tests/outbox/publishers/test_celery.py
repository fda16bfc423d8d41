"""The publisher of wake-ups, on Redis and on RabbitMQ."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from outbox.lease import ClaimedEvent
from outbox.publishers.celery import CeleryPublisher
from outbox.publishers.contract import DestinationDown, Failed, NotTried, Sent
from tests.nodes.containers import RabbitNode
from tests.outbox.publishers.case import Case, events
from tests.outbox.publishers.proxy import proxy_of
from tests.outbox.publishers.rabbitmq_cases import channel, close_connections, tell_rabbitmq
from tests.servers import ServersOfTests

CANARY = "canary-6d1f"


def test_many_messages_are_written_to_redis_before_the_first_answer_is_awaited(
    celery: Case, stack: ServersOfTests
) -> None:
    """The proxy delays all answers until the last message has passed: waiting for each answer would time out."""
    with proxy_of(stack.addresses["BROKER_URL"]) as proxy, publishing(proxy.url) as publisher:
        publisher.publish(events("opens the connection"))
        proxy.hold_answers_until(base64.b64encode(b'[[["wake-up 99"').decode())
        assert set(publisher.publish(wakeups_of_many_types(100))) == {Sent()}
    assert len(celery.arrived()) == 101


@pytest.mark.guarantee
def test_confirms_are_requested_from_rabbitmq_even_if_celeryconfig_was_read_for_redis(
    stack: ServersOfTests, rabbitmq_vhost: RabbitNode
) -> None:
    with publishing(rabbitmq_vhost.url) as publisher:
        assert (publisher.connection.transport_options or {})["confirm_publish"] is True


@pytest.mark.guarantee
def test_a_wakeup_whose_queue_was_deleted_fails_and_the_next_publish_declares_the_queue(
    celery_on_rabbitmq: Case, rabbitmq_vhost: RabbitNode
) -> None:
    """RabbitMQ confirms it nevertheless; this confirm must not be taken for that of another wake-up."""
    celery_on_rabbitmq.publisher.publish(events("before"))
    with channel(rabbitmq_vhost.url) as owner:
        owner.queue_delete("ingest")
    failed, *others = celery_on_rabbitmq.publisher.publish(wakeups_of_many_types(3))
    assert isinstance(failed, Failed)
    assert others == [NotTried(), NotTried()]
    assert celery_on_rabbitmq.publisher.publish(wakeups_of_many_types(3)) == [Sent()] * 3
    assert celery_on_rabbitmq.arrived() == ["wake-up 0", "wake-up 1", "wake-up 2"]


@pytest.mark.guarantee
def test_a_wakeup_that_a_full_queue_rejects_fails(celery_on_rabbitmq: Case, rabbitmq_vhost: RabbitNode) -> None:
    celery_on_rabbitmq.publisher.publish(events("fills it"))
    limits = '[{<<"max-length">>, 1}, {<<"overflow">>, <<"reject-publish">>}]'
    policy = f'<<"{rabbitmq_vhost.vhost}">>, <<"full">>'
    tell_rabbitmq(
        rabbitmq_vhost, f'rabbit_policy:set({policy}, <<"^ingest$">>, {limits}, 0, <<"queues">>, <<"tests">>)'
    )
    try:
        # a quorum queue accepts a few more messages before it notices that it is full
        results = [celery_on_rabbitmq.publisher.publish(events(f"wake-up {n}"))[0] for n in range(50)]
    finally:
        tell_rabbitmq(rabbitmq_vhost, f'rabbit_policy:delete({policy}, <<"tests">>)')
    assert type(results[-1]) is Failed
    assert len(celery_on_rabbitmq.arrived()) == 1 + results.count(Sent())


@pytest.mark.guarantee
def test_a_connection_that_rabbitmq_closed_while_idle_is_opened_again_and_no_wakeup_fails(
    celery_on_rabbitmq: Case, rabbitmq_vhost: RabbitNode
) -> None:
    celery_on_rabbitmq.publisher.publish(events("before"))
    close_connections(rabbitmq_vhost)
    assert celery_on_rabbitmq.publisher.publish(events("after")) == [Sent()]
    assert celery_on_rabbitmq.arrived() == ["before", "after"]


@pytest.mark.guarantee
def test_a_refused_login_is_reported_without_the_password(celery_on_rabbitmq: Case, rabbitmq_vhost: RabbitNode) -> None:
    place = rabbitmq_vhost.url.rpartition("@")[2]
    with publishing(f"amqp://unknown:{CANARY}@{place}") as publisher, pytest.raises(DestinationDown) as down:
        publisher.publish(events("one"))
    assert "ACCESS_REFUSED" in str(down.value)
    assert CANARY not in repr(down.value)


@contextmanager
def publishing(url: str) -> Iterator[CeleryPublisher]:
    publisher = CeleryPublisher("ingest", url)
    try:
        yield publisher
    finally:
        publisher.close()


def wakeups_of_many_types(count: int) -> list[ClaimedEvent]:
    """Return wake-ups that cannot share a message."""
    wakeups = events(*(f"wake-up {n}" for n in range(count)))
    return [replace(wakeup, payload={**wakeup.payload, "type": f"type {n}"}) for n, wakeup in enumerate(wakeups)]
