"""The lease functions one by one: which rows each may change, what it writes, what it returns."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from models.errors import Misuse
from outbox.lease import (
    LAST_ERROR_LIMIT,
    Db,
    ack_sent,
    ack_sent_many,
    claim_outbox,
    fail_retry,
    fail_retry_many,
    mark_dead_by_worker,
    mark_dead_many,
    release_lease,
    renew_lease,
    renew_lease_many,
)
from tests.outbox.operations import Operation, each_operation
from tests.outbox.table import LEASE, OutboxTable, without_lease

SECOND = timedelta(seconds=1)


@pytest.fixture(params=["connection", "session"])
def either(request: pytest.FixtureRequest, outbox: OutboxTable) -> Iterator[Db]:
    """A connection or a session: callers may pass either."""
    if request.param == "connection":
        yield outbox.connect()
    else:
        with Session(outbox.engine) as session:
            yield session


def token_of(db: Db, worker: str = "me", **options: Any) -> uuid.UUID:
    """Claim all events and return their token."""
    (token,) = {event.lease_token for event in claim_outbox(db, worker, limit=1000, **options)}
    return token


@pytest.mark.parametrize("with_token", [True, False], ids=["with token", "without"])
def test_a_sent_event_keeps_no_error_no_retry_time_and_no_lease(
    outbox: OutboxTable, either: Db, with_token: bool
) -> None:
    event = outbox.add(status="RETRYING", attempt_count=2, next_retry_at=outbox.later(-1), last_error="refused")
    token = token_of(either)
    before = outbox.now()
    assert ack_sent(either, event, "me", "x-1", lease_token=token if with_token else None) is True
    either.commit()
    row = outbox.row(event)
    assert before <= row["sent_at"] <= outbox.now()
    assert (row["status"], row["external_id"], row["attempt_count"]) == ("SENT", "x-1", 2)
    assert [row[name] for name in (*LEASE, "next_retry_at", "last_error")] == [None] * 6


@pytest.mark.parametrize("with_token", [True, False], ids=["with token", "without"])
def test_a_failed_event_is_not_claimed_before_the_time_that_its_caller_computed(
    outbox: OutboxTable, db: Connection, with_token: bool
) -> None:
    event = outbox.add(attempt_count=3)
    token = token_of(db)
    due = outbox.later(90)
    assert fail_retry(db, event, "me", "refused", due, lease_token=token if with_token else None) is True
    db.commit()
    row = outbox.row(event)
    assert (row["status"], row["attempt_count"], row["last_error"]) == ("RETRYING", 4, "refused")
    assert row["next_retry_at"] == due
    assert [row[name] for name in (*LEASE, "sent_at", "external_id")] == [None] * 6
    assert claim_outbox(db, "me") == []
    outbox.move_clock(91)
    assert [(claimed.id, claimed.attempt_count) for claimed in claim_outbox(db, "me")] == [(event, 4)]


@pytest.mark.parametrize("text", ["2100-01-30T12:00:00+00:00", "2100-01-30 13:00:00+01", "2100-01-30T12:00:00Z"])
def test_the_time_of_the_next_attempt_may_be_text(outbox: OutboxTable, db: Connection, text: str) -> None:
    one, other = outbox.add_many(2)
    token = token_of(db)
    assert fail_retry(db, one, "me", "refused", text, lease_token=token) is True
    assert fail_retry_many(db, {other: ("refused", text)}, "me", lease_token=token) == {other}
    db.commit()
    due = datetime(2100, 1, 30, 12, tzinfo=UTC)
    assert [outbox.row(event)["next_retry_at"] for event in (one, other)] == [due, due]


@pytest.mark.parametrize("wrong", ["tomorrow", "", "2100-01-30T12:00:00", datetime(2100, 1, 30, 12)])
def test_a_time_that_means_something_else_on_another_machine_is_refused(
    outbox: OutboxTable, db: Connection, wrong: datetime | str
) -> None:
    event = outbox.add()
    token = token_of(db)
    before = outbox.row(event)
    with pytest.raises(Misuse, match="time"):
        fail_retry(db, event, "me", "refused", wrong, lease_token=token)
    db.commit()
    assert outbox.row(event) == before


@pytest.mark.parametrize("with_token", [True, False], ids=["with token", "without"])
def test_an_event_that_dies_of_its_tenth_failure_has_attempt_count_ten(
    outbox: OutboxTable, db: Connection, with_token: bool
) -> None:
    event = outbox.add(status="RETRYING", attempt_count=9, next_retry_at=outbox.later(-1))
    token = token_of(db)
    assert mark_dead_by_worker(db, event, "me", "gone", lease_token=token if with_token else None) is True
    db.commit()
    row = outbox.row(event)
    assert (row["status"], row["attempt_count"], row["last_error"]) == ("DEAD", 10, "gone")
    assert [row[name] for name in (*LEASE, "next_retry_at", "sent_at")] == [None] * 6
    assert claim_outbox(db, "me") == []


@pytest.mark.parametrize("with_token", [True, False], ids=["with token", "without"])
@pytest.mark.parametrize("seconds", [7.5, 60, 86_400 * 3])
def test_renewing_extends_a_lease_by_its_own_length_from_now_and_never_beyond(
    outbox: OutboxTable, db: Connection, seconds: float, with_token: bool
) -> None:
    event = outbox.add()
    token = token_of(db, lease_seconds=seconds)
    outbox.move_clock(seconds / 2)
    for _ in range(2):
        before = outbox.now()
        assert renew_lease(db, event, "me", lease_token=token if with_token else None) is True
        db.commit()
        row = outbox.row(event)
        assert before <= row["locked_at"] <= outbox.now()
        assert row["lease_until"] - row["locked_at"] == timedelta(seconds=seconds)
        assert (row["lease_token"], row["locked_by"], row["status"]) == (token, "me", "NEW")


@pytest.mark.parametrize("with_token", [True, False], ids=["with token", "without"])
def test_a_released_event_is_unchanged_and_can_be_claimed_at_once(
    outbox: OutboxTable, db: Connection, with_token: bool
) -> None:
    event = outbox.add(status="RETRYING", attempt_count=2, next_retry_at=outbox.later(-1), last_error="refused")
    before = outbox.row(event)
    token = token_of(db)
    assert release_lease(db, event, "me", lease_token=token if with_token else None) is True
    db.commit()
    assert outbox.row(event) == before
    assert [claimed.id for claimed in claim_outbox(db, "you")] == [event]


@each_operation
@pytest.mark.parametrize("with_token", [True, False], ids=["with token", "without"])
def test_a_worker_that_does_not_hold_the_row_gets_false_and_changes_nothing(
    outbox: OutboxTable, db: Connection, operation: Operation, with_token: bool
) -> None:
    lost = {
        "reclaimed": "locked_by = 'you', lease_token = gen_random_uuid()",
        "held under another name": "locked_by = 'you'",
        "sent": "status = 'SENT', sent_at = ledger.ledger_now(), lease_token = NULL, lease_until = NULL",
        "dead": "status = 'DEAD', lease_token = NULL, lease_until = NULL",
        "released": "locked_by = NULL, locked_at = NULL, lease_token = NULL, lease_until = NULL",
    }
    events = dict(zip(outbox.add_many(len(lost)), lost, strict=True))
    token = token_of(db)
    for event, how in events.items():
        outbox.change(event, lost[how])
    before = outbox.rows()
    for event, how in events.items():
        assert operation.one(db, event, "me", token if with_token else None) is False, how
    assert operation.many(db, list(events), "me", token if with_token else None) == set()
    db.commit()
    assert outbox.rows() == before


@each_operation
def test_another_token_changes_nothing_even_under_the_holders_name(
    outbox: OutboxTable, db: Connection, operation: Operation
) -> None:
    event = outbox.add()
    token_of(db)
    before = outbox.row(event)
    assert operation.one(db, event, "me", uuid.uuid4()) is False
    assert operation.one(db, event + 1, "me", None) is False  # there is no such row
    db.commit()
    assert outbox.row(event) == before


@each_operation
def test_a_batch_changes_and_returns_only_the_held_rows(outbox: OutboxTable, either: Db, operation: Operation) -> None:
    mine, taken, sent = outbox.add_many(3), outbox.add(), outbox.add()
    token = token_of(either)
    outbox.change(taken, "locked_by = 'you', lease_token = gen_random_uuid()")
    outbox.change(sent, "status = 'SENT', sent_at = ledger.ledger_now(), lease_token = NULL, lease_until = NULL")
    bystander = outbox.add()
    before = outbox.rows()
    given = [sent, mine[2], taken, mine[0], bystander, 10**12, mine[1]]
    assert operation.many(either, given, "me", token) == set(mine)
    either.commit()
    after = outbox.rows()
    assert {event for event in after if after[event] != before[event]} == set(mine)


@each_operation
def test_an_empty_batch_changes_nothing_and_a_row_named_twice_is_changed_once(
    outbox: OutboxTable, db: Connection, operation: Operation
) -> None:
    event = outbox.add()
    token = token_of(db)
    assert operation.many(db, [], "me", token) == set()
    assert operation.many(db, [event, event], "me", token) == {event}
    assert outbox.row(event)["attempt_count"] == 0  # not yet committed


def test_each_row_of_a_batch_gets_its_own_values(outbox: OutboxTable, db: Connection) -> None:
    sent, retried, dead = (outbox.add_many(3) for _ in range(3))
    token = token_of(db)
    due = outbox.now()
    externals = {sent[2]: None, sent[0]: "zero", sent[1]: "one, {quoted} 'and' \"odd\" \\"}
    failures = {event: (f"refused {event}", due + event * SECOND) for event in reversed(retried)}
    assert ack_sent_many(db, externals, "me", lease_token=token) == set(sent)
    assert fail_retry_many(db, failures, "me", lease_token=token) == set(retried)
    assert mark_dead_many(db, {event: f"gone {event}" for event in dead}, "me", lease_token=token) == set(dead)
    db.commit()
    rows = outbox.rows()
    assert {event: rows[event]["external_id"] for event in sent} == externals
    assert {event: (rows[event]["last_error"], rows[event]["next_retry_at"]) for event in retried} == failures
    assert [rows[event]["last_error"] for event in dead] == [f"gone {event}" for event in dead]


@each_operation
def test_only_the_caller_commits(outbox: OutboxTable, either: Db, operation: Operation) -> None:
    """A batch is acked in the transaction that also audits it; after a rollback the lease is still held."""
    event = outbox.add()
    token = token_of(either)
    before = outbox.row(event)
    assert operation.one(either, event, "me", token) is True
    assert outbox.row(event) == before
    either.rollback()
    assert outbox.row(event) == before
    assert operation.one(either, event, "me", token) is True


@pytest.mark.parametrize("settle", ["retry", "dead"])
def test_of_a_long_error_the_end_is_kept_because_the_reason_is_there(
    outbox: OutboxTable, db: Connection, settle: str
) -> None:
    event = outbox.add()
    token = token_of(db)
    error = "Traceback …\n" + "é" * LAST_ERROR_LIMIT + "the reason"
    if settle == "retry":
        fail_retry(db, event, "me", error, outbox.now(), lease_token=token)
    else:
        mark_dead_by_worker(db, event, "me", error, lease_token=token)
    db.commit()
    kept = outbox.row(event)["last_error"]
    assert (len(kept), kept) == (LAST_ERROR_LIMIT, error[-LAST_ERROR_LIMIT:])
    assert LAST_ERROR_LIMIT == 4000


@pytest.mark.parametrize("text", ["a\x00b", "a\ud800b"], ids=["NUL", "unpaired surrogate"])
def test_text_that_postgresql_cannot_store_does_not_fail_the_batch(
    outbox: OutboxTable, db: Connection, text: str
) -> None:
    acked, retried, dead = (outbox.add_many(2) for _ in range(3))
    token = token_of(db)
    now = outbox.now()
    assert ack_sent_many(db, {acked[0]: text, acked[1]: "ok"}, "me", lease_token=token) == set(acked)
    failures = {retried[0]: (text, now), retried[1]: ("ok", now)}
    assert fail_retry_many(db, failures, "me", lease_token=token) == set(retried)
    assert mark_dead_many(db, {dead[0]: text, dead[1]: "ok"}, "me", lease_token=token) == set(dead)
    db.commit()
    rows = outbox.rows()
    assert rows[acked[0]]["external_id"] == "a\N{REPLACEMENT CHARACTER}b"
    for first, second in (retried, dead):
        assert [rows[first]["last_error"], rows[second]["last_error"]] == ["a\N{REPLACEMENT CHARACTER}b", "ok"]


def test_a_batch_without_a_token_skips_rows_whose_lease_has_expired(outbox: OutboxTable, db: Connection) -> None:
    old = outbox.add()
    claim_outbox(db, "me", lease_seconds=30)
    young = outbox.add()
    claim_outbox(db, "me", lease_seconds=90)
    outbox.move_clock(60)
    assert renew_lease_many(db, [old, young], "me") == {young}
    assert ack_sent_many(db, {old: None, young: None}, "me") == {young}


def test_reclaiming_a_row_changes_nothing_but_its_lease(outbox: OutboxTable, db: Connection) -> None:
    event = outbox.add(payload={"a": 1}, payload_sha="s", headers='{"h": 1}', ordering_key="k", attempt_count=1)
    before = outbox.row(event)
    first = token_of(db, "me")
    assert without_lease(outbox.row(event)) == without_lease(before)
    outbox.move_clock(61)
    second = token_of(db, "you")
    row = outbox.row(event)
    assert (row["locked_by"], row["lease_token"]) == ("you", second)
    assert second != first
    assert without_lease(row) == without_lease(before)
