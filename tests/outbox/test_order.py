"""Ordered keys (P20): commit order within a key, and a failed or dead head holds back its key only."""

from __future__ import annotations

import uuid
from collections import defaultdict
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
from tests.outbox.table import OutboxTable
from tests.servers import ServersOfTests

INSERT = sql(
    "INSERT INTO ledger.outbox_event (destination, payload, ordering_key) VALUES ('d', '{}', 'k') RETURNING id"
)


def claimed(db: Connection, worker: str = "me") -> tuple[set[int], uuid.UUID | None]:
    events = claim_outbox(db, worker, 100)
    return {event.id for event in events}, events[0].lease_token if events else None


def test_only_the_head_of_a_key_is_claimed(outbox: OutboxTable, db: Connection, other: Connection) -> None:
    first, second = outbox.add(ordering_key="k"), outbox.add(ordering_key="k")
    free, elsewhere = outbox.add(), outbox.add("e", ordering_key="k")
    heads, token = claimed(db)
    assert heads == {first, free, elsewhere}
    assert claimed(other, "another") == (set(), None)
    ack_sent_many(db, {first: None}, "me", lease_token=token)
    assert claimed(other, "another")[0] == set()  # not committed
    db.commit()
    assert claimed(other, "another")[0] == {second}


def test_a_failed_head_holds_back_its_key_and_no_other(outbox: OutboxTable, db: Connection) -> None:
    first, _second = outbox.add(ordering_key="k"), outbox.add(ordering_key="k")
    _, token = claimed(db)
    fail_retry_many(db, {first: ("no", outbox.later(30))}, "me", lease_token=token)
    db.commit()
    neighbour = outbox.add(ordering_key="l")
    assert claimed(db)[0] == {neighbour}
    outbox.move_clock(31)
    assert claimed(db)[0] == {first}


def test_a_dead_head_holds_its_key_until_it_is_requeued_or_gone(outbox: OutboxTable, db: Connection) -> None:
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


def test_a_scheduled_head_makes_its_key_wait(outbox: OutboxTable, db: Connection) -> None:
    first, _second = outbox.add(ordering_key="k", next_retry_at=outbox.later(60)), outbox.add(ordering_key="k")
    assert claimed(db)[0] == set()
    outbox.move_clock(61)
    assert claimed(db)[0] == {first}


def test_whoever_inserts_into_a_key_waits_for_the_commit_of_whoever_did_before(
    outbox: OutboxTable, db: Connection, other: Connection
) -> None:
    first = db.execute(INSERT).scalar_one()
    second = outbox.in_thread(lambda: other.execute(INSERT).scalar_one())
    outbox.wait_until_blocked(other)
    db.commit()
    assert second.result(10) > first
    other.commit()


def test_a_rolled_back_insert_lets_the_next_go_on(outbox: OutboxTable, db: Connection, other: Connection) -> None:
    db.execute(INSERT)
    second = outbox.in_thread(lambda: other.execute(INSERT).scalar_one())
    outbox.wait_until_blocked(other)
    db.rollback()
    head = second.result(10)
    other.commit()
    assert claimed(db)[0] == {head}


def test_an_id_that_was_drawn_before_the_wait_is_drawn_again(outbox: OutboxTable, db: Connection) -> None:
    given = db.execute(
        sql(
            "INSERT INTO ledger.outbox_event (id, destination, payload, ordering_key) VALUES (1, 'd', '{}', 'k') RETURNING id"
        )
    ).scalar_one()
    assert given > 1
    assert db.execute(INSERT).scalar_one() > given
    db.rollback()


def test_bulk_adds_with_the_same_keys_in_another_order_do_not_wait_for_each_other(stack: ServersOfTests) -> None:
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
def test_relays_that_race_and_fail_never_invert_a_key(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_RETRY_BASE_BACKOFF_MS", "0")  # failures come back at once
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


def test_twins_of_one_batch_are_sent_once(relay: Relay) -> None:
    publisher = scripted(relay, "hook", lambda event: Sent(f"their {event.id}"), dedup=True)
    ids = insert("hook", 3, dedup_key="one")
    relay.tick()
    assert publisher.got == ids[:1]
    assert rows("status, external_id") == [("SENT", f"their {ids[0]}")] * 3


def test_a_twin_takes_the_place_of_a_first_one_that_was_refused(relay: Relay) -> None:
    first, second = insert("hook", 2, payload_sha="same")
    publisher = scripted(relay, "hook", lambda event: Refused("no") if event.id == first else Sent(), dedup=True)
    relay.tick()
    assert publisher.got == [first, second]
    assert rows("status") == [("DEAD",), ("SENT",)]
