"""The relay renews its leases before and after a long publish, so that no other relay reclaims what it publishes."""

from __future__ import annotations

import time as clock
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, event

from models.engine import engine
from models.sql import sql
from outbox.destinations import Destination
from outbox.lease import ClaimedEvent, claim_outbox
from outbox.publishers.contract import Result, Sent
from outbox.relay import Relay
from tests.outbox.ledger import audits, insert, move, rows
from tests.outbox.scripted import Scripted, audit_counts, scripted
from tests.servers import ServersOfTests

LEFT = "extract(epoch FROM lease_until - ledger.ledger_now())"  # seconds until the lease expires


class Slow(Scripted):
    """A destination whose calls may take long."""

    is_slow = True


class Time:
    """The time of the relay and of the ledger, moved together. Other threads of the process keep their own time."""

    def __init__(self, stack: ServersOfTests) -> None:
        self.stack = stack
        self.passed = 0.0

    def monotonic(self) -> float:
        return clock.monotonic() + self.passed

    def passes(self, seconds: float) -> None:
        self.passed += seconds
        move(self.stack, seconds)


@pytest.fixture
def time(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time(stack)
    for module in ("relay", "settle"):
        monkeypatch.setattr(f"outbox.{module}.time", time)
    return time


@pytest.fixture
def statements(relay: Relay) -> Iterator[list[str]]:
    """The kinds of statements that change leases, in their order."""
    seen: list[str] = []

    def note(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if "e SET lease_until" in statement:
            seen.append("renew")
        elif "SET status = 'SENT'" in statement:
            seen.append("ack")

    event.listen(relay.engine, "before_cursor_execute", note)
    yield seen
    event.remove(relay.engine, "before_cursor_execute", note)


def left() -> float:
    ((seconds,),) = rows(LEFT)
    return float(seconds)


def test_a_lease_that_was_nearly_over_when_a_long_call_began_is_not_reclaimed_during_the_call(
    relay: Relay, time: Time, statements: list[str], stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = relay.settings.outbox_lease_seconds
    seen: list[float] = []

    def suspend(name: str) -> None:
        if name == "relay.after_claim":
            time.passes(lease - 1)

    def publish_slowly(_event: ClaimedEvent) -> Result:
        seen.append(left())
        time.passes(lease - 1)
        with engine().connect() as connection:
            assert claim_outbox(connection, "the other one", only="hook") == []
        return Sent()

    monkeypatch.setattr("outbox.relay.failpoint", suspend)
    relay._destinations.by_name["hook"] = Destination(Slow(publish_slowly))
    insert("hook")
    assert relay.tick(budget_seconds=10 * lease).sent == 1
    assert seen == [pytest.approx(lease, abs=1)]
    assert statements == ["renew", "renew", "ack"]


def test_a_lease_is_always_renewed_before_a_call_that_may_be_long(
    relay: Relay, statements: list[str], stack: ServersOfTests
) -> None:
    relay._destinations.by_name["hook"] = Destination(Slow())
    insert("hook")
    assert relay.tick().sent == 1
    assert statements == ["renew", "ack"]


def test_the_lease_is_full_when_the_ack_begins_after_a_long_call(
    relay: Relay, time: Time, statements: list[str], stack: ServersOfTests
) -> None:
    lease = relay.settings.outbox_lease_seconds
    seen: list[float] = []

    def before_ack(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if "SET status = 'SENT'" in statement:
            seen.append(left())

    def publish_slowly(_event: ClaimedEvent) -> Result:
        time.passes(lease - 1)
        return Sent()

    scripted(relay, "hook", publish_slowly)
    insert("hook")
    event.listen(relay.engine, "before_cursor_execute", before_ack)
    try:
        assert relay.tick(budget_seconds=10 * lease).sent == 1
    finally:
        event.remove(relay.engine, "before_cursor_execute", before_ack)
    assert seen == [pytest.approx(lease, abs=1)]
    assert statements == ["renew", "ack"]


def test_a_quick_call_costs_no_renewal(relay: Relay, statements: list[str], stack: ServersOfTests) -> None:
    scripted(relay, "hook", lambda _event: Sent())
    insert("hook", 3)
    assert relay.tick().sent == 3
    assert statements == ["ack"]


def test_no_event_is_published_whose_lease_was_lost_before_a_long_call(
    relay: Relay, time: Time, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_the_lease(name: str) -> None:
        if name == "relay.after_claim":
            time.passes(relay.settings.outbox_lease_seconds + 1)
            with engine().connect() as connection:
                assert len(claim_outbox(connection, "the other one", 1, only="hook")) == 1

    publisher = scripted(relay, "hook", lambda _event: Sent())
    monkeypatch.setattr("outbox.relay.failpoint", lose_the_lease)
    lost, kept = insert("hook", 2)
    before = audit_counts()
    assert relay.tick(budget_seconds=relay.settings.outbox_lease_seconds + 2).sent == 1
    assert publisher.got == [kept]
    assert rows("id, locked_by", "status = 'NEW'") == [(lost, "the other one")]
    assert audit_counts() - before == {"outbox_flush_conflict": 1, "outbox_flush_success": 1}
    with engine().begin() as connection:
        found = connection.execute(sql("SELECT detail FROM ledger.outbox_audit WHERE code = 'outbox_flush_conflict'"))
        assert found.scalar_one().startswith("renew: now NEW, held by the other one until ")


def test_an_event_that_was_reclaimed_during_a_long_call_is_not_acked(
    relay: Relay, time: Time, statements: list[str], stack: ServersOfTests
) -> None:
    def publish_too_slowly(_event: ClaimedEvent) -> Result:
        time.passes(relay.settings.outbox_lease_seconds + 1)
        with engine().connect() as connection:
            assert len(claim_outbox(connection, "the other one", only="hook")) == 1
        return Sent()

    scripted(relay, "hook", publish_too_slowly)
    insert("hook")
    assert relay.tick(budget_seconds=relay.settings.outbox_lease_seconds).sent == 0
    assert statements == ["renew"]
    assert audits() == {"outbox_flush_conflict": 1}
    assert rows("status, locked_by") == [("NEW", "the other one")]
