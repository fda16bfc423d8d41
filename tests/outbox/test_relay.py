"""The relay: no event is lost, a bad event or destination does not delay others, and every outcome is recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, event

import settings
from models.engine import engine, make_engine
from models.sql import sql
from outbox.circuit import Circuits
from outbox.lease import ClaimedEvent, claim_outbox
from outbox.publishers.contract import DestinationDown, Failed, Refused, Result, Sent
from outbox.relay import Relay
from settings import ROOT
from tests.outbox.ledger import WAKEUP, arrived, audits, insert, move, rows, stored_ids, woken
from tests.outbox.publishers.case import stopped
from tests.outbox.scripted import Clock, audit_counts, scripted
from tests.servers import ServersOfTests, wait_until


def test_due_wakeups_arrive_in_messages_of_at_most_a_batch_and_become_sent(relay: Relay, stack: ServersOfTests) -> None:
    insert(WAKEUP, 450)
    ticked = relay.tick()
    assert (ticked.sent, ticked.failed, ticked.dead) == (450, 0, 0)
    messages = woken(stack)
    assert {one for ids in messages for one in ids} == stored_ids()
    assert sum(map(len, messages)) == 450
    assert max(map(len, messages)) == 100
    assert set(rows("status, sent_at IS NOT NULL, lease_token, last_error")) == {("SENT", True, None, None)}


def test_a_scheduled_wakeup_is_not_published_before_its_time(relay: Relay, stack: ServersOfTests) -> None:
    with engine().begin() as connection:
        later = connection.execute(sql("SELECT ledger.ledger_now() + interval '1 hour'")).scalar_one()
    insert(WAKEUP, 3, next_retry_at=later)
    assert relay.tick().sent == 0
    move(stack, 3601)
    assert relay.tick().sent == 3


def test_ten_concurrent_relays_publish_every_event_once(relay: Relay, stack: ServersOfTests) -> None:
    insert(WAKEUP, 2000)
    relays = [Relay.of(settings.current()) for _ in range(10)]
    with ThreadPoolExecutor(10) as pool:
        sent = sum(ticked.sent for ticked in pool.map(lambda one: one.tick(), relays))
    for one in relays:
        one.close()
    assert sent == 2000
    assert arrived(stack) == Counter(stored_ids())


def test_events_of_an_unknown_destination_die_at_once_and_do_not_delay_others(
    relay: Relay, stack: ServersOfTests
) -> None:
    insert("nowhere")
    insert("celery:misspelt")
    insert(WAKEUP)
    ticked = relay.tick()
    assert (ticked.sent, ticked.dead) == (1, 2)
    assert [row[:2] for row in rows("status, attempt_count, destination")] == [("DEAD", 1), ("DEAD", 1), ("SENT", 0)]
    assert "no destination 'nowhere'" in rows("last_error")[0][0]
    assert audits() == {"outbox_flush_dead": 2, "outbox_flush_success": 1}


def test_a_relay_for_one_destination_leaves_all_other_events_alone(stack: ServersOfTests) -> None:
    insert("nowhere")
    insert(WAKEUP)
    only = Relay.of(settings.current(), only=WAKEUP)
    ticked = only.tick()
    only.close()
    assert (ticked.sent, ticked.dead) == (1, 0)
    assert rows("status, destination") == [("NEW", "nowhere"), ("SENT", WAKEUP)]


@pytest.mark.parametrize("column", ["payload", "headers"])
@pytest.mark.parametrize("dedup", [False, True])
def test_an_event_that_cannot_be_decoded_dies_and_is_never_sent_as_text(
    column: str, dedup: bool, relay: Relay, stack: ServersOfTests
) -> None:
    hook = scripted(relay, "hook", lambda _event: Sent(), dedup=dedup)
    bad, well = insert("hook", 2)
    statement = sql(
        f"UPDATE ledger.outbox_event SET {column} = CAST('{{\"n\": 1' || repeat('0', 5000) || '}}' AS jsonb)"
    )
    with engine().begin() as connection:
        connection.execute(sql(f"{statement} WHERE id = :id"), {"id": bad})
    ticked = relay.tick()
    assert (ticked.sent, ticked.dead, hook.got) == (1, 1, [well])
    assert rows() == [("DEAD", 1), ("SENT", 0)]
    assert "cannot be read" in rows("last_error")[0][0]
    with engine().begin() as connection:
        connection.execute(statement)
        connection.execute(sql("UPDATE ledger.outbox_event SET status = 'NEW', sent_at = NULL"))
    assert relay.tick().dead == 2


def test_a_failed_event_is_retried_after_doubling_waits_and_dies_after_the_last_attempt(
    relay: Relay, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(relay, "hook", lambda _event: Failed("answered 500"))
    insert("hook")
    for attempt, wait in enumerate([1, 2, 4, 8, 16, 32, 64, 128, 256], start=1):
        assert relay.tick().failed == 1
        ((status, count, error, seconds),) = rows(
            "status, attempt_count, last_error, round(extract(epoch FROM next_retry_at - ledger.ledger_now()))"
        )
        assert (status, count, error, int(seconds)) == ("RETRYING", attempt, "answered 500", wait)
        assert relay.tick().failed == 0
        move(stack, wait + 1)
    assert relay.tick().dead == 1
    assert rows("status, attempt_count, next_retry_at, last_error") == [("DEAD", 10, None, "answered 500")]
    assert audits() == {"outbox_flush_retry": 9, "outbox_flush_dead": 1}


def test_the_wait_of_an_event_that_fails_again_and_again_is_capped(
    relay: Relay, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBOX_RETRY_MAX_BACKOFF_MS", "5000")
    settings.current.cache_clear()
    relay.settings = settings.current()
    scripted(relay, "hook", lambda _event: Failed("answered 500"))
    insert("hook")
    for wait in (1, 2, 4, 5, 5):
        assert relay.tick().failed == 1
        ((seconds,),) = rows("round(extract(epoch FROM next_retry_at - ledger.ledger_now()))")
        assert int(seconds) == wait
        move(stack, wait + 1)


def test_events_that_failed_together_are_not_retried_together(
    relay: Relay, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A destination that was overloaded would get all of them again at the same moment."""
    monkeypatch.delenv("OUTBOX_RETRY_JITTER")
    settings.current.cache_clear()
    relay.settings = settings.current()
    assert relay.settings.outbox_retry_jitter == 0.3
    scripted(relay, "hook", lambda _event: Failed("answered 500"))
    insert("hook", 50)
    assert relay.tick().failed == 50
    times = [next_retry_at.timestamp() for (next_retry_at,) in rows("next_retry_at")]
    assert len(set(times)) > 45
    assert 0.3 < max(times) - min(times) <= 0.6, "a base of 1 s ± 30 %"


def test_a_destination_that_asks_for_a_longer_wait_gets_it(relay: Relay, stack: ServersOfTests) -> None:
    scripted(relay, "hook", lambda _event: Failed("answered 429", retry_after_seconds=90))
    insert("hook")
    relay.tick()
    assert rows("round(extract(epoch FROM next_retry_at - ledger.ledger_now()))") == [(90,)]


def test_a_refused_event_dies_without_another_attempt(relay: Relay, stack: ServersOfTests) -> None:
    publisher = scripted(relay, "hook", lambda event: Refused("answered 400") if event.id % 2 else Sent("x"))
    ids = insert("hook", 10)
    ticked = relay.tick()
    assert (ticked.sent, ticked.dead) == (5, 5)
    assert publisher.got == ids
    assert set(rows("status, external_id", "id % 2 = 0")) == {("SENT", "x")}
    assert audits() == {"outbox_flush_dead": 5, "outbox_flush_success": 5}


def test_an_unexpected_error_of_a_publisher_counts_as_an_attempt_and_does_not_delay_others(
    relay: Relay, stack: ServersOfTests
) -> None:
    def break_down(_event: ClaimedEvent) -> Result:
        raise KeyError("a bug")

    scripted(relay, "broken", break_down)
    scripted(relay, "hook", lambda _event: Sent())
    insert("broken")
    insert("hook")
    ticked = relay.tick()
    assert (ticked.sent, ticked.failed) == (1, 1)
    assert rows("status, attempt_count, last_error")[0] == ("RETRYING", 1, "KeyError: 'a bug'")


def test_an_equal_payload_is_not_published_twice_to_a_destination_with_dedup(
    relay: Relay, stack: ServersOfTests
) -> None:
    publisher = scripted(relay, "hook", lambda event: Sent(f"their {event.id}"), dedup=True)
    first = insert("hook", payload_sha="same")
    relay.tick()
    insert("hook", 2, payload_sha="same")
    insert("hook", payload_sha="other")
    before = audit_counts()
    relay.tick()
    assert audit_counts() - before == {"outbox_flush_dedup_hit": 2, "outbox_flush_success": 1}
    assert len(publisher.got) == 2
    assert [row[0] for row in rows("external_id", "payload_sha = 'same'")] == [f"their {first[0]}"] * 3
    assert audits()["outbox_flush_dedup_hit"] == 2


@pytest.mark.guarantee
def test_two_relays_with_twin_payloads_publish_one_of_them(relay: Relay, stack: ServersOfTests) -> None:
    """The second relay claims the twin while the first one is publishing, and looks again after it has published."""
    second = Relay.of(settings.current())
    found: list[int] = []

    def publish(event: ClaimedEvent) -> Result:
        insert("hook", payload_sha="same")
        found.append(second.tick(0.05).sent)
        return Sent("theirs")

    publisher = scripted(relay, "hook", publish, dedup=True)
    twin = scripted(second, "hook", lambda _event: Sent("again"), dedup=True)
    insert("hook", payload_sha="same")
    before = audit_counts()
    assert relay.tick().sent == 1
    assert (found, len(publisher.got), len(twin.got)) == ([0], 1, 0)
    second.tick()
    assert len(twin.got) == 0
    assert [row[0] for row in rows("external_id")] == ["theirs"] * 2
    assert (audit_counts() - before)["outbox_flush_dedup_hit"] == 1
    with engine().connect() as connection:
        locks = connection.execute(sql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")).scalar_one()
    assert locks == 0
    second.close()


def test_a_relay_that_resumes_after_its_lease_was_reclaimed_writes_nothing_but_an_audit(
    relay: Relay, stack: ServersOfTests
) -> None:
    def sleep_while_another_reclaims(_event: ClaimedEvent) -> Result:
        move(stack, relay.settings.outbox_lease_seconds + 1)
        with engine().connect() as connection:
            assert len(claim_outbox(connection, "the other one", only="hook")) == 1
        return Sent("too late")

    scripted(relay, "hook", sleep_while_another_reclaims)
    insert("hook")
    before = audit_counts()
    assert relay.tick().sent == 0  # it is not counted as sent either
    assert audit_counts() - before == {"outbox_flush_conflict": 1}
    assert rows("status, locked_by, external_id") == [("NEW", "the other one", None)]
    assert audits() == {"outbox_flush_conflict": 1}
    with engine().begin() as connection:
        detail = connection.execute(sql("SELECT detail FROM ledger.outbox_audit")).scalar_one()
    assert detail.startswith("ack: now NEW, held by the other one until ")


def test_an_outage_of_twenty_minutes_charges_only_the_probes_and_kills_none_of_fifty_wakeups(
    relay: Relay, stack: ServersOfTests
) -> None:
    clock = Clock()
    relay.circuits = Circuits(clock)
    down = True

    def answer(_event: ClaimedEvent) -> Result:
        if down:
            raise DestinationDown("connection refused")
        return Sent()

    scripted(relay, WAKEUP, answer, is_wakeup=True)
    insert(WAKEUP, 50)
    while clock.now < 20 * 60:
        relay.tick()
        clock.now += 10
        move(stack, 10)
    before = rows()
    assert {status for status, _ in before} == {"NEW", "RETRYING"}
    assert sum(count for _, count in before) <= 30  # only probes count attempts
    down = False
    clock.now += 60
    assert relay.tick().sent == 50  # all are due at once, including former probes
    assert {status for status, _ in rows()} == {"SENT"}


def test_an_event_other_than_a_wakeup_dies_if_its_destination_stays_unreachable(
    relay: Relay, stack: ServersOfTests
) -> None:
    clock = Clock()
    relay.circuits = Circuits(clock)

    def refuse(_event: ClaimedEvent) -> Result:
        raise DestinationDown("connection refused")

    scripted(relay, "kafka", refuse)
    insert("kafka")
    for _ in range(10):
        relay.tick()
        clock.now += 100
        move(stack, 1000)
    assert rows("status, attempt_count, last_error") == [("DEAD", 10, "unreachable: connection refused")]


def test_an_unreachable_destination_with_many_events_does_not_delay_others(relay: Relay, stack: ServersOfTests) -> None:
    def refuse(_event: ClaimedEvent) -> Result:
        raise DestinationDown("connection refused")

    dead = scripted(relay, "a-dead-hook", refuse)
    alive = scripted(relay, "b-hook", lambda _event: Sent())
    insert("a-dead-hook", 5000)
    insert("b-hook", 300)
    assert relay.tick().sent == 300
    asked = len(dead.got)
    insert("b-hook", 300)
    assert relay.tick().sent == 300
    assert len(alive.got) == 600
    assert len(dead.got) == asked  # its circuit is open, so its events are not claimed
    assert sum(count for _, count in rows(where="destination = 'a-dead-hook'")) == 1


def test_a_frozen_broker_gets_every_event_when_it_resumes(relay: Relay, stack: ServersOfTests) -> None:
    insert(WAKEUP, 20)
    clock = Clock()
    relay.circuits = Circuits(clock)
    with stopped(stack.running["redis-broker"].process):  # it accepts connections and does not answer
        assert relay.tick(budget_seconds=1).sent == 0
    assert relay.circuits.allows(WAKEUP) == 0
    clock.now += 60
    assert relay.tick().sent == 20
    assert arrived(stack).keys() >= stored_ids()


@pytest.mark.parametrize(
    ("place", "copies"), [("relay.after_claim", {1}), ("relay.after_publish", {2}), ("relay.in_settle", {2})]
)
def test_a_killed_relay_loses_no_event(place: str, copies: set[int], relay: Relay, stack: ServersOfTests) -> None:
    insert(WAKEUP, 30)
    killed = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "relay", "--once"],
        env=os.environ | {"FAILPOINTS": f"{place}=kill"},
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    wait_until(lambda: _unlocked_events() == 30, "PostgreSQL has rolled back what the killed relay had begun")
    assert {status for status, _ in rows()} == {"NEW"}
    assert relay.tick().sent == 0  # the leases of the killed relay have not expired yet
    move(stack, relay.settings.outbox_lease_seconds + 1)
    assert relay.tick().sent == 30
    assert arrived(stack).keys() == stored_ids()
    assert set(arrived(stack).values()) == copies  # twice only if it died after the publish


def _unlocked_events() -> int:
    with engine().begin() as connection:
        return len(connection.execute(sql("SELECT FROM ledger.outbox_event FOR UPDATE SKIP LOCKED")).all())


def test_a_database_timeout_is_counted_at_once_and_audited_when_the_database_answers_again(
    relay: Relay, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay.engine.dispose()
    relay.engine = make_engine(settings.current().database_url, statement_timeout_seconds=0.2)
    insert(WAKEUP)
    before = audit_counts()
    with engine().begin() as blocker:
        blocker.execute(sql("LOCK TABLE ledger.outbox_event IN ACCESS EXCLUSIVE MODE"))
        assert relay.tick().sent == 0
        assert audit_counts() - before == {"outbox_flush_db_timeout": 1}
    assert audits() == {}
    assert relay.tick().sent == 1
    assert audits() == {"outbox_flush_db_timeout": 1, "outbox_flush_success": 1}
    assert audit_counts() - before == {"outbox_flush_db_timeout": 1, "outbox_flush_success": 1}


def test_a_batch_of_any_size_takes_the_same_few_statements(relay: Relay, stack: ServersOfTests) -> None:
    counts = []
    for size in (1, 200):
        scripted(relay, "hook", lambda _event: Sent(), is_wakeup=True)
        insert("hook", size)
        with counted(relay) as statements:
            assert relay.tick().sent == size
        counts.append(len(statements))
    assert counts[0] == counts[1] <= 5  # destinations, claim, ack with its audit, claim, claim


@contextmanager
def counted(relay: Relay) -> Iterator[list[str]]:
    """Yield a list that collects the statements of a relay."""
    statements: list[str] = []

    def note(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(relay.engine, "before_cursor_execute", note)
    yield statements
    event.remove(relay.engine, "before_cursor_execute", note)
