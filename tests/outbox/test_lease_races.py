"""Two holders at once: each race is forced, on connections that are stepped by hand."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from sqlalchemy import Connection

from models.sql import sql
from outbox.lease import ClaimedEvent, ack_sent, claim_outbox, renew_lease, renew_lease_many
from outbox.lease_statements import CLAIM_ANY
from tests.outbox.operations import BY_NAME, Operation, each_operation
from tests.outbox.table import OutboxTable

# What a row looks like to the recheck after a wait depends on how the planner joined it: each way must be right.
PLANS: dict[str, dict[str, str]] = {
    "as planned": {},
    "nested loops": {"enable_hashjoin": "off", "enable_mergejoin": "off", "enable_seqscan": "off", "jit": "off"},
    "hash joins": {"enable_nestloop": "off", "enable_mergejoin": "off", "jit": "off"},
    "merge joins": {"enable_nestloop": "off", "enable_hashjoin": "off", "jit": "off"},
}
each_plan = pytest.mark.parametrize("plan", PLANS)
EXPIRED = 61


def claim(db: Connection, worker: str, **options: Any) -> tuple[list[int], uuid.UUID]:
    """What is claimed, and its token."""
    events = claim_outbox(db, worker, limit=100, **options)
    (token,) = {event.lease_token for event in events}
    return sorted(event.id for event in events), token


def claim_without_commit(db: Connection, worker: str, limit: int = 100) -> list[int]:
    """The statement alone: a claim in mid-air."""
    values = {"worker_id": worker, "limit": limit, "lease_seconds": 60, "lease_token": uuid.uuid4(), "without": []}
    return sorted(db.execute(CLAIM_ANY, values).scalars())


def test_two_claims_one_after_the_other_share_nothing(outbox: OutboxTable, db: Connection, other: Connection) -> None:
    events = outbox.add_many(5)
    mine = [event.id for event in claim_outbox(db, "me", limit=3)]
    yours = [event.id for event in claim_outbox(other, "you", limit=3)]
    assert (mine, yours) == (events[:3], events[3:])
    assert claim_outbox(db, "me") == []


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_claim_in_mid_air_is_neither_waited_for_nor_shared(
    outbox: OutboxTable, db: Connection, other: Connection, ends: str
) -> None:
    events = outbox.add_many(5)
    assert claim_without_commit(db, "me", 3) == events[:3]
    assert [event.id for event in claim_outbox(other, "you", limit=3)] == events[3:]
    getattr(db, ends)()
    left = [event.id for event in claim_outbox(other, "you")]
    assert left == ([] if ends == "commit" else events[:3])


@pytest.mark.parametrize("lock", ["FOR UPDATE", "FOR NO KEY UPDATE", "FOR SHARE"])
def test_a_claim_skips_rows_that_anybody_has_locked_and_still_fills_its_batch(
    outbox: OutboxTable, db: Connection, other: Connection, lock: str
) -> None:
    events = outbox.add_many(6)
    held = sql(f"SELECT id FROM ledger.outbox_event WHERE id = ANY(:ids) {lock}")
    db.execute(held, {"ids": [events[0], events[2]]})
    assert [event.id for event in claim_outbox(other, "you", limit=3)] == [events[1], events[3], events[4]]
    db.rollback()
    assert [event.id for event in claim_outbox(other, "you")] == [events[0], events[2], events[5]]


def claim_whose_snapshot_is_old(
    outbox: OutboxTable, other: Connection
) -> tuple[Connection, Future[list[ClaimedEvent]]]:
    """A claim that has taken its snapshot, and has locked nothing yet: it waits to be told the time.

    It goes on when the connection that is returned ends its transaction.
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
    "put off": lambda outbox, db, event: outbox.change(
        event, "next_retry_at = ledger.ledger_now() + interval '1 day'", db
    ),
    "deleted": lambda _outbox, db, event: db.execute(
        sql("DELETE FROM ledger.outbox_event WHERE id = :id"), {"id": event}
    ),
}


@pytest.mark.parametrize("meanwhile", LOST_MEANWHILE.values(), ids=LOST_MEANWHILE.keys())
def test_a_claim_looks_again_at_a_row_that_changed_between_its_snapshot_and_its_lock(
    outbox: OutboxTable, other: Connection, meanwhile: Callable[[OutboxTable, Connection, int], object]
) -> None:
    event = outbox.add()
    gate, claiming = claim_whose_snapshot_is_old(outbox, other)
    meanwhile(outbox, gate, event)
    before = gate.execute(sql("SELECT * FROM ledger.outbox_event")).all()
    gate.commit()
    assert claiming.result(20) == []
    assert gate.execute(sql("SELECT * FROM ledger.outbox_event")).all() == before


def test_a_claim_that_was_stopped_really_had_an_old_snapshot(outbox: OutboxTable, other: Connection) -> None:
    """Or the test above would prove nothing."""
    old = outbox.add()
    gate, claiming = claim_whose_snapshot_is_old(outbox, other)
    gate.execute(sql("INSERT INTO ledger.outbox_event (destination, payload) VALUES ('d', '{}')"))
    gate.commit()
    assert [event.id for event in claiming.result(20)] == [old]


def test_a_lease_renewed_at_the_last_moment_is_not_taken_over(
    outbox: OutboxTable, db: Connection, other: Connection
) -> None:
    event = outbox.add()
    _, token = claim(db, "me")
    outbox.move_clock(EXPIRED)
    gate, claiming = claim_whose_snapshot_is_old(outbox, other)
    assert renew_lease(gate, event, "me", lease_token=token) is True
    gate.commit()
    assert claiming.result(20) == []
    assert ack_sent(db, event, "me", lease_token=token) is True


def test_an_ack_that_is_late_but_that_nobody_was_faster_than_counts_by_its_token(
    outbox: OutboxTable, db: Connection
) -> None:
    event = outbox.add()
    _, token = claim(db, "me")
    outbox.move_clock(EXPIRED)
    assert ack_sent(db, event, "me") is False
    assert ack_sent(db, event, "me", lease_token=token) is True


@each_operation
def test_after_its_lease_a_holder_may_go_on_by_token_while_nobody_took_the_row(
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
def test_a_sleeper_whose_row_was_taken_over_can_write_nothing(
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
def test_a_sleeper_that_was_itself_given_the_row_again_is_fenced_by_its_old_token(
    outbox: OutboxTable, db: Connection, other: Connection, operation: Operation
) -> None:
    """Two threads of one worker: the name is the same, only the token tells the sleeper from the successor."""
    event = outbox.add()
    _, token = claim(db, "me")
    outbox.move_clock(EXPIRED)
    _, new_token = claim(other, "me")
    before = outbox.rows()
    assert operation.one(db, event, "me", token) is False
    db.commit()
    assert outbox.rows() == before
    assert operation.one(other, event, "me", new_token) is True


def test_without_a_token_a_name_cannot_tell_a_sleeper_from_its_successor(
    outbox: OutboxTable, db: Connection, other: Connection
) -> None:
    """Why our own code always passes the token (P16)."""
    event = outbox.add()
    claim(db, "me")
    outbox.move_clock(EXPIRED)
    claim(other, "me")
    assert ack_sent(db, event, "me") is True


@pytest.mark.parametrize(
    ("name", "plan"), [*((name, "as planned") for name in BY_NAME), *(("ack", plan) for plan in list(PLANS)[1:])]
)
@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_write_that_waits_for_a_take_over_looks_again_when_it_is_decided(
    outbox: OutboxTable, other: Connection, name: str, plan: str, ends: str
) -> None:
    sleeper = outbox.connect(**PLANS[plan])
    outbox.add_many(9)
    events, token = claim(sleeper, "me")
    outbox.move_clock(EXPIRED)
    outbox.change(events[0], "lease_until = ledger.ledger_now() + interval '1 hour'")  # one that is not taken over
    taken = claim_without_commit(other, "you")
    assert taken == events[1:]
    writing = outbox.in_thread(BY_NAME[name].many, sleeper, events[::-1], "me", token)
    outbox.wait_until_blocked(sleeper)
    getattr(other, ends)()
    assert writing.result(20) == ({events[0]} if ends == "commit" else set(events))
    sleeper.commit()
    if ends == "commit":
        assert {row["locked_by"] for event, row in outbox.rows().items() if event in taken} == {"you"}


@each_plan
def test_a_write_that_waits_for_a_renewal_of_its_own_lease_builds_on_it(
    outbox: OutboxTable, db: Connection, plan: str
) -> None:
    """The row has changed, but it is still held: the write must neither be refused nor undo the change."""
    sleeper = outbox.connect(**PLANS[plan])
    outbox.add_many(5, attempt_count=1)
    events, token = claim(sleeper, "me")
    outbox.move_clock(30)
    assert renew_lease_many(db, events, "me", lease_token=token) == set(events)
    outbox.change(events[0], "attempt_count = 7", db)
    writing = outbox.in_thread(BY_NAME["retry"].many, sleeper, events, "me", token)
    outbox.wait_until_blocked(sleeper)
    db.commit()
    assert writing.result(20) == set(events)
    sleeper.commit()
    assert [row["attempt_count"] for row in outbox.rows().values()] == [8, 2, 2, 2, 2]


@pytest.mark.parametrize("name", ["ack", "dead", "renew"])
def test_a_claim_does_not_wait_for_the_late_write_of_the_holder_nor_take_its_row(
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
def test_a_sleeper_cannot_touch_a_row_that_died_and_was_requeued(
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


def test_an_ack_that_waits_for_a_requeue_is_refused_when_that_is_committed(
    outbox: OutboxTable, db: Connection, other: Connection
) -> None:
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


def test_of_two_acks_at_once_one_counts(outbox: OutboxTable, db: Connection, other: Connection) -> None:
    event = outbox.add()
    _, token = claim(db, "me")
    assert ack_sent(db, event, "me", "first", lease_token=token) is True
    second = outbox.in_thread(ack_sent, other, event, "me", "second", lease_token=token)
    outbox.wait_until_blocked(other)
    db.commit()
    assert second.result(20) is False
    other.commit()
    assert outbox.row(event)["external_id"] == "first"
