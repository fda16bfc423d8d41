"""Claiming and looking for duplicates: which rows, in which order, how many, and in which transaction."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from models.errors import Misuse
from models.outbox import OutboxEvent
from outbox.lease import NO_FLOOR, Floor, SentDuplicate, ack_sent_many, check_dedup, check_dedup_many, claim_outbox
from tests.outbox.table import OutboxTable


def claimed(db: Connection, limit: int = 100, **options: Any) -> list[int]:
    return [event.id for event in claim_outbox(db, "me", limit, **options)]


def retrying_since(outbox: OutboxTable, seconds: float) -> dict[str, Any]:
    """Return the columns of an old event that has been due again for some seconds."""
    return {"status": "RETRYING", "next_retry_at": outbox.later(-seconds), "created_at": outbox.later(-1000)}


def test_a_claim_returns_what_to_publish_and_the_token_that_it_wrote(outbox: OutboxTable, db: Connection) -> None:
    payload = {"n": 1, "text": "é"}
    event = outbox.add("orders", payload, payload_sha="abc", headers='{"trace": "t"}', attempt_count=2)
    before = outbox.now()
    (got,) = claim_outbox(db, "me", lease_seconds=30)
    assert (got.id, got.destination, got.payload, got.payload_sha) == (event, "orders", payload, "abc")
    assert (got.headers, got.attempt_count) == ({"trace": "t"}, 2)
    row = outbox.row(event)
    assert (row["locked_by"], row["lease_token"], row["status"]) == ("me", got.lease_token, "NEW")
    assert before <= row["locked_at"] <= outbox.now()
    assert row["lease_until"] - row["locked_at"] == timedelta(seconds=30)
    assert got.waiting_since == row["created_at"]


def test_by_default_a_claim_leases_ten_events_for_a_minute(outbox: OutboxTable, db: Connection) -> None:
    outbox.add_many(11)
    got = claim_outbox(db, "me")
    assert len(got) == 10
    row = outbox.row(got[0].id)
    assert row["lease_until"] - row["locked_at"] == timedelta(minutes=1)


def test_the_events_of_a_claim_share_a_token_that_no_other_claim_has(outbox: OutboxTable, db: Connection) -> None:
    outbox.add_many(30)
    tokens = [{event.lease_token for event in claim_outbox(db, "me", limit=3)} for _ in range(10)]
    assert [len(of_one_claim) for of_one_claim in tokens] == [1] * 10
    assert len(set[uuid.UUID]().union(*tokens)) == 10


def test_only_unsent_due_events_without_a_live_lease_are_claimed(outbox: OutboxTable, db: Connection) -> None:
    past, future = outbox.later(-1), outbox.later(3600)

    def leased(until: Any) -> dict[str, Any]:
        return {"locked_by": "you", "locked_at": past, "lease_token": str(uuid.uuid4()), "lease_until": until}

    free = [
        outbox.add(),
        outbox.add(next_retry_at=past),
        outbox.add(status="RETRYING", next_retry_at=past),
        outbox.add(status="RETRYING"),
        outbox.add(**leased(past)),
        outbox.add(status="RETRYING", next_retry_at=past, **leased(past)),
    ]
    outbox.add(status="SENT", sent_at=past)
    outbox.add(status="DEAD")
    outbox.add(next_retry_at=future)
    outbox.add(status="RETRYING", next_retry_at=future)
    outbox.add(**leased(future))
    outbox.add(status="RETRYING", next_retry_at=past, **leased(future))
    outbox.add(next_retry_at=future, **leased(past))
    assert sorted(claimed(db)) == free


def test_a_scheduled_event_is_not_claimed_before_its_time(outbox: OutboxTable, db: Connection) -> None:
    event = outbox.add(next_retry_at=outbox.later(3600))
    outbox.move_clock(3600 - 10)
    assert claimed(db) == []
    outbox.move_clock(11)
    (got,) = claim_outbox(db, "me")
    assert (got.id, got.waiting_since) == (event, outbox.row(event)["next_retry_at"])


def test_a_lease_is_not_reclaimed_before_it_expires(outbox: OutboxTable, db: Connection) -> None:
    event = outbox.add()
    assert claimed(db, lease_seconds=3600) == [event]
    outbox.move_clock(3600 - 10)
    assert claimed(db) == []
    outbox.move_clock(11)
    assert claimed(db) == [event]


@pytest.mark.parametrize("limit", [0, 1, 7, 12, 100])
def test_a_claim_never_exceeds_its_limit_with_many_destinations(
    outbox: OutboxTable, db: Connection, limit: int
) -> None:
    events = {event for name in "abc" for event in outbox.add_many(4, name)}
    first = claimed(db, limit)
    assert len(first) == min(limit, 12)
    assert set(first) | set(claimed(db)) == events
    assert len([row for row in outbox.rows().values() if row["locked_by"]]) == 12


def test_the_oldest_events_are_claimed_first_across_destinations(outbox: OutboxTable, db: Connection) -> None:
    events = [outbox.add(name) for name in "cabbac"]
    assert [claimed(db, 2) for _ in range(3)] == [events[:2], events[2:4], events[4:]]


def test_of_failed_events_those_that_were_due_first_are_claimed_first(outbox: OutboxTable, db: Connection) -> None:
    waiting = [("a", 20), ("b", 70), ("a", 10), ("c", 40), ("b", 50), ("c", 30), ("a", 60)]
    seconds = {outbox.add(name, **retrying_since(outbox, s)): s for name, s in waiting}
    expected = sorted(seconds, key=lambda event: -seconds[event])
    assert [claimed(db, 4), claimed(db, 4)] == [expected[:4], expected[4:]]


def test_the_events_of_a_claim_are_sorted_by_how_long_they_have_waited(outbox: OutboxTable, db: Connection) -> None:
    late = outbox.add(**retrying_since(outbox, 5))
    new = outbox.add(created_at=outbox.later(-10))
    early = outbox.add(**retrying_since(outbox, 20))
    assert claimed(db) == [early, new, late]


def test_retries_and_new_events_are_claimed_together_by_how_long_they_have_waited(
    outbox: OutboxTable, db: Connection
) -> None:
    old = outbox.add(created_at=outbox.later(-30))
    retry = outbox.add(**retrying_since(outbox, 20))
    new = outbox.add_many(5, created_at=outbox.later(-10))
    assert claimed(db, 2) == [old, retry]
    assert claimed(db) == new


def test_an_event_created_in_the_future_is_claimed(outbox: OutboxTable, db: Connection) -> None:
    event = outbox.add(created_at=outbox.later(3600))
    assert claimed(db) == [event]


def test_a_claim_of_one_destination_leaves_the_events_of_the_others(outbox: OutboxTable, db: Connection) -> None:
    a, b, c = outbox.add_many(2, "a"), outbox.add_many(3, "b"), outbox.add_many(2, "c")
    assert claimed(db, only="no such") == []
    assert claimed(db, only="b", limit=2) == b[:2]
    assert claimed(db, only="b") == b[2:]
    assert claimed(db) == [*a, *c]


def test_a_floor_skips_the_events_below_it_for_one_claim_only(outbox: OutboxTable, db: Connection) -> None:
    events = outbox.add_many(4, "a")
    floor = Floor(fresh_id=events[1])
    assert claimed(db, only="a", after=floor) == events[2:]
    assert claimed(db, only="a", after=floor) == []
    assert claimed(db, only="a") == events[:2]


def test_a_floor_rises_above_the_claimed_events_in_each_of_its_ranges(outbox: OutboxTable, db: Connection) -> None:
    def add_all() -> list[int]:
        at = outbox.later(-60)
        scheduled = [outbox.add(next_retry_at=at, status="RETRYING") for _ in range(3)]
        return [*scheduled, *outbox.add_many(3), *(outbox.add(ordering_key=key) for key in ("", "Z", "a", "é"))]

    below = add_all()
    events = claim_outbox(db, "me", only="d")
    assert [event.id for event in events] == below
    floor = NO_FLOOR.above(events)
    ack_sent_many(db, dict.fromkeys(below), "me")
    db.commit()
    above = [*outbox.add_many(2), outbox.add(next_retry_at=outbox.later(-1)), outbox.add(ordering_key="ê")]
    late = outbox.add(ordering_key="b")  # between two keys that were claimed
    assert set(claimed(db, only="d", after=floor)) == set(above)
    assert claimed(db, only="d") == [late]


def test_a_claim_is_committed_before_it_returns(outbox: OutboxTable, db: Connection) -> None:
    event = outbox.add()
    claim_outbox(db, "me")
    assert not db.in_transaction()
    db.rollback()
    assert outbox.row(event)["locked_by"] == "me"


def test_a_claim_through_a_session_is_committed_before_it_returns(outbox: OutboxTable) -> None:
    event = outbox.add()
    with Session(outbox.engine) as session:
        assert [got.id for got in claim_outbox(session, "me")] == [event]
        assert not session.in_transaction()
        session.rollback()
    assert outbox.row(event)["locked_by"] == "me"


def test_a_claim_does_not_commit_unfinished_work_of_its_connection(outbox: OutboxTable, db: Connection) -> None:
    event = outbox.add()
    outbox.change(event, "last_error = 'half done'", db)
    with pytest.raises(Misuse, match="has an open transaction"):
        claim_outbox(db, "me")
    db.rollback()
    row = outbox.row(event)
    assert (row["last_error"], row["locked_by"]) == (None, None)
    with db.begin(), pytest.raises(Misuse):
        claim_outbox(db, "me")
    assert claimed(db) == [event]


def test_a_claim_does_not_commit_unsaved_objects_of_a_session(outbox: OutboxTable) -> None:
    outbox.add()
    with Session(outbox.engine) as session:
        session.add(OutboxEvent(destination="d", payload={}))  # not even sent to the database yet
        with pytest.raises(Misuse):
            claim_outbox(session, "me")
        session.rollback()
        session.execute(text("SELECT 1"))
        with pytest.raises(Misuse):
            claim_outbox(session, "me")
    assert [row["locked_by"] for row in outbox.rows().values()] == [None]


def test_a_claim_is_refused_in_a_session_that_joined_an_outer_transaction(outbox: OutboxTable, db: Connection) -> None:
    """The commit of such a session commits nothing, so a rollback outside could undo the claim."""
    event = outbox.add()
    with db.begin() as outer, Session(db) as session:
        with pytest.raises(Misuse):
            claim_outbox(session, "me")
        outer.rollback()
    with Session(db) as session:
        assert [got.id for got in claim_outbox(session, "me")] == [event]
    assert outbox.row(event)["locked_by"] == "me"


def test_the_newest_sent_event_with_the_same_payload_is_the_duplicate(outbox: OutboxTable, db: Connection) -> None:
    old, new = outbox.later(-60), outbox.later(-30)
    sent = {"status": "SENT", "payload_sha": "s"}
    newest = outbox.add(sent_at=new, external_id="x-new", **sent)
    outbox.add(sent_at=old, external_id="x-old", **sent)
    outbox.add("elsewhere", sent_at=outbox.now(), external_id="x-elsewhere", **sent)
    outbox.add(payload_sha="s")
    outbox.add(payload_sha="s", status="DEAD")
    outbox.add(payload_sha="unsent", status="RETRYING")
    assert check_dedup(db, "d", "s") == SentDuplicate(newest, "x-new", new)
    assert check_dedup(db, "d", "unsent") is None
    assert check_dedup(db, "nowhere", "s") is None


def test_of_events_sent_at_the_same_time_the_one_with_the_highest_id_is_the_duplicate(outbox: OutboxTable) -> None:
    at = outbox.now()
    later = outbox.add_many(3, status="SENT", payload_sha="s", sent_at=at)[-1]
    with Session(outbox.engine) as session:
        assert check_dedup(session, "d", "s") == SentDuplicate(later, None, at)


def test_an_explicit_dedup_key_replaces_the_hash_of_the_payload(outbox: OutboxTable, db: Connection) -> None:
    sent: dict[str, Any] = {"status": "SENT", "sent_at": outbox.now()}
    event = outbox.add(payload_sha="a", dedup_key="invoice 7", external_id="theirs", **sent)
    found = check_dedup(db, "d", "invoice 7")
    assert found is not None
    assert (found.id, found.external_id) == (event, "theirs")
    assert check_dedup(db, "d", "a") is None


def test_the_duplicates_of_a_whole_batch_are_found_at_once(outbox: OutboxTable, db: Connection) -> None:
    at = outbox.now()
    wanted = [(name, sha) for name in "ab" for sha in ("s1", "s2", "s3")]
    sent = [(name, sha) for name, sha in wanted if (name, sha) != ("b", "s2")]
    ids = {pair: outbox.add(pair[0], payload_sha=pair[1], status="SENT", sent_at=at) for pair in sent}
    outbox.add("a", status="SENT", sent_at=at)  # without a hash it is never a duplicate
    assert check_dedup_many(db, [*wanted, ("a", "s1")]) == {p: SentDuplicate(i, None, at) for p, i in ids.items()}
    assert check_dedup_many(db, [("b", "s2")]) == {}  # sent, but to another destination
    assert check_dedup_many(db, []) == {}
