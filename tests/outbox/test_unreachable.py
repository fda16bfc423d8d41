"""A broker that stays unreachable: its wake-ups die like every event, and no task is stranded because of that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import settings
from models.sql import sql
from outbox.circuit import Circuits
from outbox.lease import ClaimedEvent
from outbox.publishers.contract import DestinationDown, Failed, NotTried, Result, Sent
from outbox.relay import Relay
from tests.outbox.ledger import WAKEUP, arrived, audits, insert, move, rows, stored_ids
from tests.outbox.scripted import Clock, Scripted, audit_counts, scripted
from tests.servers import ServersOfTests

DEAD_OF_OUTAGE: dict[str, Any] = {
    "status": "DEAD",
    "attempt_count": 10,
    "last_error": "unreachable: connection refused",
}


def refuse(_event: ClaimedEvent) -> Result:
    raise DestinationDown("connection refused")


@pytest.fixture
def clock(relay: Relay) -> Clock:
    clock = Clock()
    relay.circuits = Circuits(clock)
    return clock


@contextmanager
def relay_of(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Iterator[Relay]:
    """Yield a relay with other settings, as another process would have."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings.current.cache_clear()
    relay = Relay.of(settings.current())
    yield relay
    relay.close()


def wait(stack: ServersOfTests, clock: Clock, seconds: float = 1000) -> None:
    """Let both the circuit and the backoff of every event pass."""
    clock.now += seconds
    move(stack, seconds)


def test_a_wakeup_for_a_dead_port_is_retrying_then_dead_and_is_sent_when_the_broker_is_there(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert(WAKEUP)
    settled = {"OUTBOX_MAX_ATTEMPTS": "3", "OUTBOX_RETRY_BASE_BACKOFF_MS": "0", "OUTBOX_RETRY_MAX_BACKOFF_MS": "0"}
    with relay_of(monkeypatch, BROKER_URL="redis://127.0.0.1:65530/0", **settled) as relay:
        clock = Clock()
        relay.circuits = Circuits(clock)
        for attempt, status in [(1, "RETRYING"), (2, "RETRYING"), (3, "DEAD")]:
            relay.tick()
            assert rows() == [(status, attempt)]
            clock.now += 100
    ((next_retry_at, error),) = rows("next_retry_at, last_error")
    assert next_retry_at is None
    assert error.startswith("unreachable: The broker accepts no messages")
    assert audits() == {"outbox_flush_retry": 2, "outbox_flush_dead": 1}
    with relay_of(monkeypatch, BROKER_URL=stack.addresses["BROKER_URL"]) as relay:  # a process without an open circuit
        relay.tick()
    assert rows() == [("SENT", 0)]
    assert arrived(stack).keys() == stored_ids()


def test_when_the_broker_answers_again_its_dead_wakeups_are_sent_and_refused_ones_stay_dead(
    relay: Relay, clock: Clock, stack: ServersOfTests
) -> None:
    publisher = scripted(relay, WAKEUP, refuse, is_wakeup=True)
    died = insert(WAKEUP, 3, **DEAD_OF_OUTAGE)
    refused = insert(WAKEUP, status="DEAD", attempt_count=1, last_error="There is no queue 'ingest'.")
    waiting = insert(WAKEUP, 2)
    relay.tick()
    publisher.answer = lambda _event: Sent()
    wait(stack, clock)
    relay.tick()
    assert dict(rows("id, status")) == {**dict.fromkeys(died + waiting, "SENT"), **dict.fromkeys(refused, "DEAD")}
    assert audits()["outbox_requeued"] == 3
    assert sorted(publisher.got[2:]) == died + waiting  # the first two calls found the broker unreachable


def test_dead_wakeups_are_requeued_although_no_other_event_is_left_to_find_out_that_the_broker_answers(
    relay: Relay, clock: Clock, stack: ServersOfTests
) -> None:
    publisher = scripted(relay, WAKEUP, refuse, is_wakeup=True)
    died = insert(WAKEUP, 3, **DEAD_OF_OUTAGE)
    before = audit_counts()
    for tries in (1, 2, 3):
        assert relay.tick().dead == 0
        assert relay.tick().dead == 0  # the circuit is open
        assert publisher.got == died[:1] * tries
        wait(stack, clock)
    assert rows() == [("DEAD", 10)] * 3  # the probe is not charged
    assert audits() == audit_counts() - before == {"outbox_flush_retry": 3}  # the outage does not go silent
    publisher.answer = lambda _event: Sent()
    assert relay.tick().sent == 3
    assert rows() == [("SENT", 0)] * 3


@pytest.mark.parametrize("answer", [Failed("nack"), NotTried()], ids=["fails", "has no time"])
def test_a_broker_that_answers_something_else_to_the_probe_loses_no_wakeup(
    answer: Result, relay: Relay, clock: Clock, stack: ServersOfTests
) -> None:
    publisher = scripted(relay, WAKEUP, lambda _event: answer, is_wakeup=True)
    insert(WAKEUP, **DEAD_OF_OUTAGE)
    relay.tick()
    assert rows() == [("RETRYING", 1) if isinstance(answer, Failed) else ("DEAD", 10)]
    publisher.answer = lambda _event: Sent()
    wait(stack, clock)
    assert relay.tick().sent == 1


def test_an_event_of_another_destination_that_died_of_an_outage_waits_for_the_operator(
    relay: Relay, clock: Clock, stack: ServersOfTests
) -> None:
    publisher = scripted(relay, "hook", refuse)
    insert("hook", **DEAD_OF_OUTAGE)
    insert("hook")
    relay.tick()
    publisher.answer = lambda _event: Sent()
    wait(stack, clock)
    assert relay.tick().sent == 1
    assert rows() == [("DEAD", 10), ("SENT", 1)]


def test_looking_for_dead_wakeups_does_not_read_the_events_that_were_refused(
    relay: Relay, stack: ServersOfTests
) -> None:
    publisher: Scripted = scripted(relay, WAKEUP, lambda _event: Sent(), is_wakeup=True)
    insert(WAKEUP, 5000, status="DEAD", last_error="There is no queue 'ingest'.")
    relay.tick()
    assert publisher.got == []
    with stack.cluster.superuser.begin() as connection:
        connection.execute(sql("ANALYZE ledger.outbox_event"))
        plan = connection.execute(
            sql("""EXPLAIN SELECT FROM ledger.outbox_event
                WHERE destination = :name AND status = 'DEAD' AND last_error LIKE 'unreachable: %'"""),
            {"name": WAKEUP},
        )
        assert "ix_outbox_event_unreachable" in "\n".join(plan.scalars())
