"""Races between two holders. Each race is forced: the test decides when each connection goes on."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from sqlalchemy import Connection

from models.sql import sql
from outbox.lease import NO_FLOOR, ClaimedEvent, ack_sent, claim_outbox, renew_lease, renew_lease_many
from outbox.lease_statements import CLAIM_ANY
from tests.outbox.operations import BY_NAME, Operation, each_operation
from tests.outbox.table import OutboxTable

# After waiting for a lock PostgreSQL checks the row again. What it sees depends on the join, so each plan is tested.
PLANS: dict[str, dict[str, str]] = {
    "as planned": {},
    "nested loops": {"enable_hashjoin": "off", "enable_mergejoin": "off", "enable_seqscan": "off", "jit": "off"},
    "hash joins": {"enable_nestloop": "off", "enable_mergejoin": "off", "jit": "off"},
    "merge joins": {"enable_nestloop": "off", "enable_hashjoin": "off", "jit": "off"},
}
each_plan = pytest.mark.parametrize("plan", PLANS)
EXPIRED = 61


def claim(db: Connection, worker: str, **options: Any) -> tuple[list[int], uuid.UUID]:
    """Claim and return the ids and their token."""
    events = claim_outbox(db, worker, limit=100, **options)
    (token,) = {event.lease_token for event in events}
    return sorted(event.id for event in events), token


def claim_without_commit(db: Connection, worker: str, limit: int = 100) -> list[int]:
    """Execute the claim's statement without its commit. Return the ids."""
    values = {"worker_id": worker, "limit": limit, "lease_seconds": 60, "lease_token": uuid.uuid4()}
    return sorted(db.execute(CLAIM_ANY, {**values, **NO_FLOOR.values}).scalars())


def test_two_claims_never_return_the_same_event(outbox: OutboxTable, db: Connection, other: Connection) -> None:
    events = outbox.add_many(5)
    mine = [event.id for event in claim_outbox(db, "me", limit=3)]
    yours = [event.id for event in claim_outbox(other, "you", limit=3)]
    assert (mine, yours) == (events[:3], events[3:])
    assert claim_outbox(db, "me") == []


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_claim_skips_the_events_of_an_uncommitted_claim_without_waiting(
    outbox: OutboxTable, db: Connection, other: Connection, ends: str
) -> None:
    events = outbox.add_many(5)
    assert claim_without_commit(db, "me", 3) == events[:3]
    assert [event.id for event in claim_outbox(other, "you", limit=3)] == events[3:]
    getattr(db, ends)()
    left = [event.id for event in claim_outbox(other, "you")]
    assert left == ([] if ends == "commit" else events[:3])


@pytest.mark.parametrize("lock", ["FOR UPDATE", "FOR NO KEY UPDATE", "FOR SHARE"])
def test_a_claim_skips_locked_rows_and_still_fills_its_batch(
    outbox: OutboxTable, db: Connection, other: Connection, lock: str
) -> None:
    events = outbox.add_many(6)
    held = sql(f"SELECT id FROM ledger.outbox_event WHERE id = ANY(:ids) {lock}")
    db.execute(held, {"ids": [events[0], events[2]]})
    assert [event.id for event in claim_outbox(other, "you", limit=3)] == [events[1], events[3], events[4]]
    db.rollback()
    assert [event.id for event in claim_outbox(other, "you")] == [events[0], events[2], events[5]]


def start_claim_with_old_snapshot(
    outbox: OutboxTable, other: Connection
) -> tuple[Connection, Future[list[ClaimedEvent]]]:
    """Start a claim that has taken its snapshot and waits, before it locks a row, for the table of the clock.

    It goes on when the returned connection ends its transaction.
    """
    gate = outbox.superuser()
    gate.execute(sql("LOCK TABLE ledger.ledger_clock IN ACCESS EXCLUSIVE MODE"))
    claiming = outbox.in_thread(claim_outbox, other, "you", 100)
    outbox.wait_until_blocked(other)
    return gate, claiming


LOST_MEANWHILE: dict[str, Callable[[OutboxTable, Connection, int], object]] = {
    "claimed": lambda _outbox, db, _event: claim_without_commit(db, "me"),
    "sent": lambda outbox, db, event: outbox.change(event, "status = 'SENT', sent_at = ledger.ledger_now()", db),
    "dead": lambda outbox, db, event: outbox.change(event, "status = 'DEAD'", db),
    "postponed": lambda outbox, db, event: outbox.change(
        event, "next_retry_at = ledger.ledger_now() + interval '1 day'", db
    ),
    "deleted": lambda _outbox, db, event: db.execute(
        sql("DELETE FROM ledger.outbox_event WHERE id = :id"), {"id": event}
    ),
}


@pytest.mark.parametrize("meanwhile", LOST_MEANWHILE.values(), ids=LOST_MEANWHILE.keys())
def test_a_claim_checks_a_row_again_that_changed_between_its_snapshot_and_its_lock(
    outbox: OutboxTable, other: Connection, meanwhile: Callable[[OutboxTable, Connection, int], object]
) -> None:
    event = outbox.add()
    gate, claiming = start_claim_with_old_snapshot(outbox, other)
    meanwhile(outbox, gate, event)
    before = gate.execute(sql("SELECT * FROM ledger.outbox_event")).all()
    gate.commit()
    assert claiming.result(20) == []
    assert gate.execute(sql("SELECT * FROM ledger.outbox_event")).all() == before


def test_the_delayed_claim_really_has_an_old_snapshot(outbox: OutboxTable, other: Connection) -> None:
    """Without this, the test above would prove nothing."""
    old = outbox.add()
    gate, claiming = start_claim_with_old_snapshot(outbox, other)
    gate.execute(sql("INSERT INTO ledger.outbox_event (destination, payload) VALUES ('d', '{}')"))
    gate.commit()
    assert [event.id for event in claiming.result(20)] == [old]


def test_a_lease_renewed_at_the_last_moment_is_not_reclaimed(
    outbox: OutboxTable, db: Connection, other: Connection
) -> None:
    event = outbox.add()
    _, token = claim(db, "me")
    outbox.move_clock(EXPIRED)
    gate, claiming = start_claim_with_old_snapshot(outbox, other)
    assert renew_lease(gate, event, "me", lease_token=token) is True
    gate.commit()
    assert claiming.result(20) == []
    assert ack_sent(db, event, "me", lease_token=token) is True


def test_a_late_ack_counts_by_its_token_if_the_row_was_not_reclaimed(outbox: OutboxTable, db: Connection) -> None:
    event = outbox.add()
    _, token = claim(db, "me")
    outbox.move_clock(EXPIRED)
    assert ack_sent(db, event, "me") is False
    assert ack_sent(db, event, "me", lease_token=token) is True


@each_operation
def test_a_holder_with_an_expired_lease_may_write_by_token_until_the_row_is_reclaimed(
    outbox: OutboxTable, db: Connection, operation: Operation
) -> None:
    outbox.add_many(2)
    events, token = claim(db, "me")
    outbox.move_clock(EXPIRED)
    before = outbox.rows()
    assert operation.many(db, events, "me", None) == set()
    db.commit()
    assert outbox.rows() == before
    assert operation.many(db, events, "me", token) == set(events)


@each_operation
@pytest.mark.parametrize("with_token", [True, False], ids=["with token", "without"])
def test_a_worker_that_resumes_after_its_row_was_reclaimed_writes_nothing(
    outbox: OutboxTable, db: Connection, other: Connection, operation: Operation, with_token: bool
) -> None:
    event = outbox.add()
    _, token = claim(db, "me")
    outbox.move_clock(EXPIRED)
    events, new_token = claim(other, "you")
    assert events == [event]
    before = outbox.rows()
    assert operation.one(db, event, "me", token if with_token else None) is False
    db.commit()
    assert outbox.rows() == before
    assert operation.one(other, event, "you", new_token) is True


@each_operation
def test_an_old_token_writes_nothing_even_if_the_same_worker_reclaimed_the_row(
    outbox: OutboxTable, db: Connection, other: Connection, operation: Operation
) -> None:
    """Two threads of one worker have the same name; only the token tells the old holder from the new one."""
    event = outbox.add()
    _, token = claim(db, "me")
    outbox.move_clock(EXPIRED)
    _, new_token = claim(other, "me")
    before = outbox.rows()
    assert operation.one(db, event, "me", token) is False
    db.commit()
    assert outbox.rows() == before
    assert operation.one(other, event, "me", new_token) is True


def test_without_a_token_the_old_and_the_new_holder_of_one_name_are_not_told_apart(
    outbox: OutboxTable, db: Connection, other: Connection
) -> None:
    """This is why our own code always passes the token."""
    event = outbox.add()
    claim(db, "me")
    outbox.move_clock(EXPIRED)
    claim(other, "me")
    assert ack_sent(db, event, "me") is True


@pytest.mark.parametrize(
    ("name", "plan"), [*((name, "as planned") for name in BY_NAME), *(("ack", plan) for plan in list(PLANS)[1:])]
)
@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_write_that_waited_for_a_concurrent_reclaim_checks_the_lease_again(
    outbox: OutboxTable, other: Connection, name: str, plan: str, ends: str
) -> None:
    late = outbox.connect(**PLANS[plan])
    outbox.add_many(9)
    events, token = claim(late, "me")
    outbox.move_clock(EXPIRED)
    outbox.change(events[0], "lease_until = ledger.ledger_now() + interval '1 hour'")  # one that is not reclaimed
    taken = claim_without_commit(other, "you")
    assert taken == events[1:]
    writing = outbox.in_thread(BY_NAME[name].many, late, events[::-1], "me", token)
    outbox.wait_until_blocked(late)
    getattr(other, ends)()
    assert writing.result(20) == ({events[0]} if ends == "commit" else set(events))
    late.commit()
    if ends == "commit":
        assert {row["locked_by"] for event, row in outbox.rows().items() if event in taken} == {"you"}


@each_plan
def test_a_write_that_waited_for_a_renewal_of_its_own_lease_is_applied_on_top_of_it(
    outbox: OutboxTable, db: Connection, plan: str
) -> None:
    """The row has changed but is still held: the write must not be refused and must not undo the change."""
    late = outbox.connect(**PLANS[plan])
    outbox.add_many(5, attempt_count=1)
    events, token = claim(late, "me")
    outbox.move_clock(30)
    assert renew_lease_many(db, events, "me", lease_token=token) == set(events)
    outbox.change(events[0], "attempt_count = 7", db)
    writing = outbox.in_thread(BY_NAME["retry"].many, late, events, "me", token)
    outbox.wait_until_blocked(late)
    db.commit()
    assert writing.result(20) == set(events)
    late.commit()
    assert [row["attempt_count"] for row in outbox.rows().values()] == [8, 2, 2, 2, 2]


@pytest.mark.parametrize("name", ["ack", "dead", "renew"])
def test_a_claim_neither_waits_for_a_late_write_of_the_holder_nor_reclaims_its_row(
    outbox: OutboxTable, db: Connection, other: Connection, name: str
) -> None:
    outbox.add_many(3)
    events, token = claim(db, "me")
    outbox.move_clock(EXPIRED)
    assert BY_NAME[name].many(db, events[:2], "me", token) == set(events[:2])
    assert [event.id for event in claim_outbox(other, "you")] == events[2:]
    db.commit()
    assert claim_outbox(other, "you") == []


REQUEUE = "status = 'NEW', attempt_count = 0, last_error = NULL"


@each_operation
@pytest.mark.parametrize("claimed_again_by", [None, "me", "you"])
def test_an_old_token_cannot_change_a_row_that_died_and_was_requeued(
    outbox: OutboxTable, db: Connection, other: Connection, operation: Operation, claimed_again_by: str | None
) -> None:
    event = outbox.add()
    _, token = claim(db, "me")
    outbox.move_clock(EXPIRED)
    _, new_token = claim(other, "you")
    assert BY_NAME["dead"].one(other, event, "you", new_token) is True
    other.commit()
    outbox.change(event, REQUEUE)
    if claimed_again_by:
        claim(other, claimed_again_by)
    before = outbox.rows()
    for old_token in (token, new_token):
        for worker in ("me", "you"):
            assert operation.one(db, event, worker, old_token) is False
    db.commit()
    assert outbox.rows() == before


def test_an_ack_that_waited_for_a_requeue_is_refused(outbox: OutboxTable, db: Connection, other: Connection) -> None:
    event = outbox.add()
    _, token = claim(db, "me")
    changes = f"{REQUEUE}, locked_by = NULL, locked_at = NULL, lease_token = NULL, lease_until = NULL"
    outbox.change(event, changes, other)
    acking = outbox.in_thread(ack_sent, db, event, "me", "x", lease_token=token)
    outbox.wait_until_blocked(db)
    other.commit()
    assert acking.result(20) is False
    db.commit()
    row = outbox.row(event)
    assert (row["status"], row["external_id"], row["sent_at"]) == ("NEW", None, None)


def test_of_two_concurrent_acks_one_counts(outbox: OutboxTable, db: Connection, other: Connection) -> None:
    event = outbox.add()
    _, token = claim(db, "me")
    assert ack_sent(db, event, "me", "first", lease_token=token) is True
    second = outbox.in_thread(ack_sent, other, event, "me", "second", lease_token=token)
    outbox.wait_until_blocked(other)
    db.commit()
    assert second.result(20) is False
    other.commit()
    assert outbox.row(event)["external_id"] == "first"
