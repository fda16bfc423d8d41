"""Ordering keys: events of a key are sent in commit order, and a failed or dead event holds back its own key only."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Connection

import outbox as api
import settings
from models.engine import sessions
from models.sql import sql
from outbox.lease import ack_sent_many, claim_outbox, fail_retry_many, mark_dead_many
from outbox.publishers.contract import Failed, Refused, Result, Sent
from outbox.relay import Relay
from tests.outbox.ledger import insert, rows
from tests.outbox.scripted import scripted
from tests.outbox.table import OutboxTable, pid
from tests.servers import ServersOfTests

INSERT = sql(
    "INSERT INTO ledger.outbox_event (destination, payload, ordering_key) VALUES ('d', '{}', 'k') RETURNING id"
)


def claimed(db: Connection, worker: str = "me") -> tuple[set[int], uuid.UUID | None]:
    events = claim_outbox(db, worker, 100)
    return {event.id for event in events}, events[0].lease_token if events else None


def test_only_the_first_unsent_event_of_a_key_is_claimed(
    outbox: OutboxTable, db: Connection, other: Connection
) -> None:
    first, second = outbox.add(ordering_key="k"), outbox.add(ordering_key="k")
    free, elsewhere = outbox.add(), outbox.add("e", ordering_key="k")
    heads, token = claimed(db)
    assert heads == {first, free, elsewhere}
    assert claimed(other, "another") == (set(), None)
    ack_sent_many(db, {first: None}, "me", lease_token=token)
    assert claimed(other, "another")[0] == set()  # not committed
    db.commit()
    assert claimed(other, "another")[0] == {second}


def test_a_failed_event_holds_back_its_key_and_no_other(outbox: OutboxTable, db: Connection) -> None:
    first, _second = outbox.add(ordering_key="k"), outbox.add(ordering_key="k")
    _, token = claimed(db)
    fail_retry_many(db, {first: ("no", outbox.later(30))}, "me", lease_token=token)
    db.commit()
    neighbour = outbox.add(ordering_key="l")
    assert claimed(db)[0] == {neighbour}
    outbox.move_clock(31)
    assert claimed(db)[0] == {first}


def test_a_dead_event_holds_back_its_key_until_it_is_requeued_or_deleted(outbox: OutboxTable, db: Connection) -> None:
    first, second = outbox.add(ordering_key="k"), outbox.add(ordering_key="k")
    _, token = claimed(db)
    mark_dead_many(db, {first: "no"}, "me", lease_token=token)
    db.commit()
    assert claimed(db)[0] == set()
    outbox.change(first, "status = 'NEW', attempt_count = 0")
    again, token = claimed(db)
    assert again == {first}
    mark_dead_many(db, {first: "no"}, "me", lease_token=token)
    db.execute(sql("DELETE FROM ledger.outbox_event WHERE id = :id"), {"id": first})
    db.commit()
    assert claimed(db)[0] == {second}


def test_a_scheduled_event_holds_back_its_key(outbox: OutboxTable, db: Connection) -> None:
    first, _second = outbox.add(ordering_key="k", next_retry_at=outbox.later(60)), outbox.add(ordering_key="k")
    assert claimed(db)[0] == set()
    outbox.move_clock(61)
    assert claimed(db)[0] == {first}


def test_an_insert_into_a_key_waits_for_the_commit_of_the_insert_before(
    outbox: OutboxTable, db: Connection, other: Connection
) -> None:
    first = db.execute(INSERT).scalar_one()
    second = outbox.in_thread(lambda: other.execute(INSERT).scalar_one())
    outbox.wait_until_blocked(other)
    db.commit()
    assert second.result(10) > first
    other.commit()


def test_a_rolled_back_insert_lets_the_next_insert_of_its_key_go_on(
    outbox: OutboxTable, db: Connection, other: Connection
) -> None:
    db.execute(INSERT)
    second = outbox.in_thread(lambda: other.execute(INSERT).scalar_one())
    outbox.wait_until_blocked(other)
    db.rollback()
    head = second.result(10)
    other.commit()
    assert claimed(db)[0] == {head}


def test_an_id_from_before_the_wait_is_replaced_by_a_new_one(outbox: OutboxTable, db: Connection) -> None:
    with_id = sql("""
        INSERT INTO ledger.outbox_event (id, destination, payload, ordering_key) VALUES (1, 'd', '{}', 'k')
        RETURNING id""")
    given = db.execute(with_id).scalar_one()
    assert given > 1
    assert db.execute(INSERT).scalar_one() > given
    db.rollback()


ORDERED = [api.NewEvent("d", {}, ordering_key="k")]


@pytest.mark.usefixtures("stack")
@pytest.mark.parametrize("bulk_first", [True, False], ids=["bulk add first", "plain INSERT first"])
def test_a_bulk_add_and_a_plain_insert_of_one_key_wait_for_each_other(
    outbox: OutboxTable, db: Connection, other: Connection, bulk_first: bool
) -> None:
    adds: list[Callable[[Connection], int]] = [
        lambda connection: api.add_many(connection, ORDERED)[0],
        lambda connection: connection.execute(INSERT).scalar_one(),
    ]
    first, second = adds if bulk_first else adds[::-1]
    first_id = first(db)
    adding = outbox.in_thread(second, other)
    outbox.wait_until_blocked(other)
    db.commit()
    assert adding.result(10) > first_id
    other.commit()


@pytest.mark.usefixtures("stack")
def test_a_bulk_add_waits_for_its_keys_before_it_draws_an_id(
    outbox: OutboxTable, db: Connection, other: Connection
) -> None:
    """Its lock must be that of the trigger: otherwise it would wait inside the INSERT, with other keys locked."""
    db.execute(INSERT)
    adding = outbox.in_thread(api.add_many, other, [api.NewEvent("d", {}, ordering_key="a"), *ORDERED])
    outbox.wait_until_blocked(other)
    with outbox.cluster.superuser.connect() as watcher:
        query = watcher.execute(sql("SELECT query FROM pg_stat_activity WHERE pid = :pid"), {"pid": pid(other)})
        assert "pg_advisory_xact_lock" in query.scalar_one()
    db.commit()
    assert len(adding.result(10)) == 2
    other.commit()


@pytest.mark.usefixtures("stack")
def test_two_bulk_adds_with_the_same_keys_in_opposite_orders_do_not_deadlock(
    outbox: OutboxTable, db: Connection, other: Connection
) -> None:
    """Both wait for one key in the middle of their lists while the other half of the keys is still free."""
    keys = [f"key {n}" for n in range(1200)]  # more than one chunk
    gate = outbox.connect()
    api.add_many(gate, [api.NewEvent("d", {}, ordering_key=keys[600])])

    def add(connection: Connection, order: list[str]) -> int:
        added = api.add_many(connection, [api.NewEvent("d", {}, ordering_key=key) for key in order])
        connection.commit()
        return len(added)

    adding = [outbox.in_thread(add, db, keys), outbox.in_thread(add, other, keys[::-1])]
    outbox.wait_until_blocked(db, other)
    gate.commit()
    assert [one.result(30) for one in adding] == [1200, 1200]


def test_many_concurrent_bulk_adds_with_the_same_keys_do_not_deadlock(stack: ServersOfTests) -> None:
    keys = [f"key {n}" for n in range(20)]

    def add(order: list[str]) -> None:
        for _ in range(10):
            with sessions()() as session:
                api.add_many(session, [api.NewEvent("hook", {}, ordering_key=key) for key in order])
                session.commit()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, [keys, keys[::-1], keys[10:] + keys[:10], sorted(keys)]))
    assert len(rows()) == 800


@pytest.mark.guarantee
def test_concurrent_relays_with_failures_never_change_the_order_within_a_key(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBOX_RETRY_BASE_BACKOFF_MS", "0")  # failures are due at once
    monkeypatch.setenv("OUTBOX_PUBLISH_BATCH_SIZE", "7")
    monkeypatch.setenv("OUTBOX_MAX_ATTEMPTS", "1000")
    settings.current.cache_clear()
    with sessions()() as session:
        for n in range(15):
            api.add_many(session, [api.NewEvent("hook", n, ordering_key=f"key {key}") for key in range(12)])
        session.commit()
    sent: defaultdict[str | None, list[int]] = defaultdict(list)
    failures = 0

    def answer(n: int, key: str | None, attempt: int) -> Result:
        nonlocal failures
        if (n + attempt) % 3 == 0 and attempt < 4:
            failures += 1
            return Failed("not now")
        sent[key].append(n)
        return Sent()

    relays = [Relay.of(settings.current()) for _ in range(3)]
    for relay in relays:
        scripted(relay, "hook", lambda event: answer(event.payload, event.ordering_key, event.attempt_count))
    with ThreadPoolExecutor(3) as pool:
        while any(status != "SENT" for status, _ in rows()):
            list(pool.map(Relay.tick, relays))
    for relay in relays:
        relay.close()
    assert failures > 0
    assert dict(sent) == {f"key {key}": list(range(15)) for key in range(12)}


def test_equal_events_of_one_batch_are_published_once(relay: Relay) -> None:
    publisher = scripted(relay, "hook", lambda event: Sent(f"their {event.id}"), dedup=True)
    ids = insert("hook", 3, dedup_key="one")
    relay.tick()
    assert publisher.got == ids[:1]
    assert rows("status, external_id") == [("SENT", f"their {ids[0]}")] * 3


def test_if_the_first_of_two_equal_events_is_refused_the_second_is_published(relay: Relay) -> None:
    first, second = insert("hook", 2, payload_sha="same")
    publisher = scripted(relay, "hook", lambda event: Refused("no") if event.id == first else Sent(), dedup=True)
    relay.tick()
    assert publisher.got == [first, second]
    assert rows("status") == [("DEAD",), ("SENT",)]
