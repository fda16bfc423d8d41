"""Every publisher keeps the contract of outbox/publishers/contract.py, tested with its real server."""

from __future__ import annotations

import pytest

from outbox.publishers.contract import DestinationDown, Sent
from tests.outbox.publishers.case import Case, events

RABBITMQ = [pytest.param(name, marks=pytest.mark.guarantee) for name in ("amqp", "celery_on_rabbitmq")]


@pytest.fixture(params=["celery", "http", "kafka", "kafka_wakeups", "redis_stream", *RABBITMQ])
def case(request: pytest.FixtureRequest) -> Case:
    made: Case = request.getfixturevalue(request.param)
    return made


def test_events_reported_as_sent_have_arrived_once(case: Case) -> None:
    names = [f"event {n:03}" for n in range(250)]
    results = case.publisher.publish(events(*names))
    assert [type(result) for result in results] == [Sent] * 250
    arrived = case.arrived()
    assert (arrived if case.keeps_order else sorted(arrived)) == names


def test_text_of_any_language_arrives_unchanged(case: Case) -> None:
    case.publisher.publish(events("naïve 任务 🥬 \\ \" '"))
    assert case.arrived() == ["naïve 任务 🥬 \\ \" '"]


def test_a_destination_that_refuses_connections_is_down(case: Case) -> None:
    publisher = case.unreachable()
    with pytest.raises(DestinationDown):
        publisher.publish(events("lost"))
    publisher.close()


def test_a_destination_that_hangs_is_down_after_a_few_seconds_and_can_be_used_again_later(case: Case) -> None:
    case.publisher.publish(events("before"))
    with case.hanging(), pytest.raises(DestinationDown):
        case.publisher.publish(events("while it hangs"))
    assert [type(result) for result in case.publisher.publish(events("after"))] == [Sent]
    assert {"before", "after"} <= set(case.arrived())


def test_a_closed_publisher_can_be_used_again(case: Case) -> None:
    case.publisher.close()
    assert [type(result) for result in case.publisher.publish(events("again"))] == [Sent]
