"""Rows that another program locks with `locked_by` and `locked_at` alone, without a token and without `lease_until`."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
from sqlalchemy import Connection

from outbox.dead_events import Choice, requeue
from outbox.lease import claim_outbox, renew_lease
from tests.outbox.operations import Operation, each_operation
from tests.outbox.table import LEASE, OutboxTable


def lock(outbox: OutboxTable, event: int, worker: str = "them") -> None:
    outbox.change(event, "locked_by = :worker, locked_at = ledger.ledger_now()", worker=worker)


@pytest.mark.parametrize("columns", [{}, {"ordering_key": "k"}, {"status": "RETRYING"}], ids=["new", "key", "retrying"])
def test_a_row_that_another_program_has_locked_is_not_claimed_before_a_lease_has_passed(
    outbox: OutboxTable, db: Connection, columns: dict[str, str]
) -> None:
    event = outbox.add(**columns, next_retry_at=outbox.later(-1))
    lock(outbox, event)
    assert claim_outbox(db, "me", lease_seconds=60) == []
    outbox.move_clock(59)
    assert claim_outbox(db, "me", lease_seconds=60) == []
    assert claim_outbox(db, "me", lease_seconds=60, only="d") == []
    outbox.move_clock(2)
    assert [claimed.id for claimed in claim_outbox(db, "me", lease_seconds=60)] == [event]
    row = outbox.row(event)
    assert row["locked_by"] == "me"
    assert row["lease_until"] is not None


@each_operation
def test_the_program_that_locked_a_row_by_its_name_alone_may_finish_it(
    outbox: OutboxTable, db: Connection, operation: Operation
) -> None:
    event = outbox.add()
    lock(outbox, event)
    before = outbox.row(event)
    assert operation.one(db, event, "me", None) is False
    assert operation.one(db, event, "them", uuid.uuid4()) is False
    db.commit()
    assert outbox.row(event) == before
    assert operation.one(db, event, "them", None) is True
    db.commit()
    row = outbox.row(event)
    assert row != before
    if operation.name != "renew":
        assert [row[name] for name in LEASE] == [None] * 4


@each_operation
def test_a_program_whose_row_was_claimed_after_its_lock_expired_writes_nothing(
    outbox: OutboxTable, db: Connection, operation: Operation
) -> None:
    event = outbox.add()
    lock(outbox, event)
    outbox.move_clock(61)
    assert len(claim_outbox(db, "me")) == 1
    before = outbox.row(event)
    assert operation.one(db, event, "them", None) is False
    db.commit()
    assert outbox.row(event) == before


def test_a_program_that_renews_its_lock_in_time_keeps_its_row(outbox: OutboxTable, db: Connection) -> None:
    event = outbox.add()
    lock(outbox, event)
    for _ in range(3):
        outbox.move_clock(59)
        before = outbox.now()
        assert renew_lease(db, event, "them") is True
        db.commit()
        row = outbox.row(event)
        assert before <= row["locked_at"] <= before + timedelta(seconds=10)
        assert (row["lease_token"], row["lease_until"]) == (None, None)
        assert claim_outbox(db, "me") == []


def test_a_dead_event_whose_lock_was_left_behind_can_be_claimed_at_once_after_a_requeue(
    outbox: OutboxTable, db: Connection
) -> None:
    event = outbox.add(status="DEAD")
    lock(outbox, event)
    assert list(requeue(outbox.engine, Choice(), actor="operator")) == [[event]]
    assert [claimed.id for claimed in claim_outbox(db, "me")] == [event]
