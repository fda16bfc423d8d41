"""What only the publisher of wake-ups does, on either broker."""

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


def test_wakeups_of_many_kinds_wait_for_redis_together(celery: Case, stack: ServersOfTests) -> None:
    """No answer comes before the last wake-up has passed: whoever waits for one by one waits in vain."""
    with proxy_of(stack.addresses["BROKER_URL"]) as proxy, ringing(proxy.url) as publisher:
        publisher.publish(events("opens the connection"))
        proxy.hold_answers_until(base64.b64encode(b'[[["wake-up 99"').decode())
        assert set(publisher.publish(of_many_kinds(100))) == {Sent()}
    assert len(celery.arrived()) == 101


@pytest.mark.guarantee
def test_rabbitmq_confirms_each_wakeup_whatever_broker_the_settings_were_read_for(
    stack: ServersOfTests, rabbitmq_vhost: RabbitNode
) -> None:
    with ringing(rabbitmq_vhost.url) as publisher:
        assert (publisher.connection.transport_options or {})["confirm_publish"] is True


@pytest.mark.guarantee
def test_a_wakeup_whose_queue_was_deleted_fails_and_the_next_one_declares_it_again(
    celery_on_rabbitmq: Case, rabbitmq_vhost: RabbitNode
) -> None:
    """RabbitMQ confirms it all the same; and that confirm must not be taken for that of another wake-up."""
    celery_on_rabbitmq.publisher.publish(events("before"))
    with channel(rabbitmq_vhost.url) as owner:
        owner.queue_delete("ingest")
    failed, *others = celery_on_rabbitmq.publisher.publish(of_many_kinds(3))
    assert isinstance(failed, Failed)
    assert others == [NotTried(), NotTried()]
    assert celery_on_rabbitmq.publisher.publish(of_many_kinds(3)) == [Sent()] * 3
    assert celery_on_rabbitmq.arrived() == ["wake-up 0", "wake-up 1", "wake-up 2"]


@pytest.mark.guarantee
def test_a_wakeup_that_a_full_queue_does_not_take_fails(celery_on_rabbitmq: Case, rabbitmq_vhost: RabbitNode) -> None:
    celery_on_rabbitmq.publisher.publish(events("fills it"))
    limits = '[{<<"max-length">>, 1}, {<<"overflow">>, <<"reject-publish">>}]'
    policy = f'<<"{rabbitmq_vhost.vhost}">>, <<"full">>'
    tell_rabbitmq(
        rabbitmq_vhost, f'rabbit_policy:set({policy}, <<"^ingest$">>, {limits}, 0, <<"queues">>, <<"tests">>)'
    )
    try:
        # a quorum queue takes a few more before it has heard that it is full
        results = [celery_on_rabbitmq.publisher.publish(events(f"wake-up {n}"))[0] for n in range(50)]
    finally:
        tell_rabbitmq(rabbitmq_vhost, f'rabbit_policy:delete({policy}, <<"tests">>)')
    assert type(results[-1]) is Failed
    assert len(celery_on_rabbitmq.arrived()) == 1 + results.count(Sent())


@pytest.mark.guarantee
def test_a_connection_that_rabbitmq_closed_while_idle_costs_no_wakeup(
    celery_on_rabbitmq: Case, rabbitmq_vhost: RabbitNode
) -> None:
    celery_on_rabbitmq.publisher.publish(events("before"))
    close_connections(rabbitmq_vhost)
    assert celery_on_rabbitmq.publisher.publish(events("after")) == [Sent()]
    assert celery_on_rabbitmq.arrived() == ["before", "after"]


@pytest.mark.guarantee
def test_who_is_not_let_in_finds_the_broker_down_and_no_password_in_the_reason(
    celery_on_rabbitmq: Case, rabbitmq_vhost: RabbitNode
) -> None:
    place = rabbitmq_vhost.url.rpartition("@")[2]
    with ringing(f"amqp://nobody:{CANARY}@{place}") as publisher, pytest.raises(DestinationDown) as down:
        publisher.publish(events("one"))
    assert "ACCESS_REFUSED" in str(down.value)
    assert CANARY not in repr(down.value)


@contextmanager
def ringing(url: str) -> Iterator[CeleryPublisher]:
    publisher = CeleryPublisher("ingest", url)
    try:
        yield publisher
    finally:
        publisher.close()


def of_many_kinds(count: int) -> list[ClaimedEvent]:
    """Wake-ups that cannot share a message."""
    wakeups = events(*(f"wake-up {n}" for n in range(count)))
    return [replace(wakeup, payload={**wakeup.payload, "type": f"type {n}"}) for n, wakeup in enumerate(wakeups)]
