"""The cost of the lease protocol: one statement per batch, and claims that do not get slower with the history."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, event
from sqlalchemy.orm import Session

from models.sql import sql
from outbox.lease import NO_FLOOR, check_dedup_many, claim_outbox
from outbox.lease_statements import CLAIM_ANY, CLAIM_GIVEN
from tests.outbox.operations import Operation, each_operation
from tests.outbox.table import OutboxTable

CLAIMED = 20


@contextmanager
def statements_of(connection: Connection) -> Iterator[list[str]]:
    """Yield a list that collects the first word of each statement."""
    words: list[str] = []

    def on_execute(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        words.append(statement.split(maxsplit=1)[0])

    def on_commit(_connection: Connection) -> None:
        words.append("COMMIT")

    event.listen(connection, "before_cursor_execute", on_execute)
    event.listen(connection, "commit", on_commit)
    try:
        yield words
    finally:
        event.remove(connection, "before_cursor_execute", on_execute)
        event.remove(connection, "commit", on_commit)


@each_operation
def test_a_batch_is_one_statement_and_an_empty_batch_is_none(
    outbox: OutboxTable, db: Connection, operation: Operation
) -> None:
    ids = outbox.add_many(50)
    (token,) = {claimed.lease_token for claimed in claim_outbox(db, "me", 50)}
    with statements_of(db) as words:
        operation.many(db, [], "me", token)
        assert words == []
        assert operation.many(db, ids, "me", token) == set(ids)
        assert words == ["WITH"]


def test_a_claim_is_one_statement_and_a_commit(outbox: OutboxTable, db: Connection) -> None:
    for name in "abc":
        outbox.add_many(5, name)
    with statements_of(db) as words:
        assert len(claim_outbox(db, "me", 7)) == 7
        assert len(claim_outbox(db, "me", only="b")) + len(claim_outbox(db, "me")) == 8
    assert words == ["WITH", "COMMIT"] * 3
    with Session(db) as session, statements_of(db) as words:
        claim_outbox(session, "me")
    assert words == ["WITH", "COMMIT"]


def test_the_duplicates_of_a_batch_are_found_by_one_query(outbox: OutboxTable, db: Connection) -> None:
    with statements_of(db) as words:
        check_dedup_many(db, [("a", str(n)) for n in range(200)])
    assert words == ["SELECT"]


def pages(connection: Connection, statement: Any, **values: Any) -> int:
    """Return how many pages a claim reads to find and lock its events. It is rolled back.

    What it reads to write them is left out: that depends on where the table has room.
    """
    parameters = {"worker_id": "me", "limit": CLAIMED, "lease_seconds": 60, "lease_token": None, **values}
    explain = sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) {statement}".replace(":lease_token", "gen_random_uuid()"))
    explained: Any = connection.execute(explain, parameters).scalar_one()
    connection.rollback()
    plan = explained if isinstance(explained, list) else json.loads(explained)
    (due,) = (part for part in plan[0]["Plan"]["Plans"] if part.get("Subplan Name") == "CTE due")
    assert due["Actual Rows"] == CLAIMED
    return int(due["Shared Hit Blocks"]) + int(due["Shared Read Blocks"])


def add_history(outbox: OutboxTable) -> None:
    outbox.add_many(10_000, status="SENT", sent_at=outbox.now())
    outbox.add_many(10_000, next_retry_at=outbox.later(86_400))
    outbox.add_many(3_000)


def add_other_destinations(outbox: OutboxTable) -> None:
    for name in ("a", "e"):  # they sort before and after the destination that is claimed
        outbox.add_many(10_000, name)


def add_long_key(outbox: OutboxTable) -> None:
    outbox.add_many(10_000, ordering_key="k", next_retry_at=outbox.later(86_400))


@pytest.mark.parametrize(
    ("statement", "burden"),
    [
        (CLAIM_ANY, add_history),
        (CLAIM_ANY, add_long_key),
        (CLAIM_GIVEN, add_history),
        (CLAIM_GIVEN, add_long_key),
        (CLAIM_GIVEN, add_other_destinations),
    ],
)
def test_a_claim_does_not_read_more_pages_because_of_events_that_it_does_not_claim(
    outbox: OutboxTable, statement: Any, burden: Callable[[OutboxTable], None]
) -> None:
    def measure() -> int:
        with outbox.cluster.superuser.connect() as connection:
            connection.execute(sql("TRUNCATE ledger.ledger_clock; ANALYZE ledger.outbox_event"))
            connection.commit()
            return min(pages(connection, statement, only="d", **NO_FLOOR.values) for _ in range(3))

    with outbox.cluster.superuser.begin() as connection:
        connection.execute(sql("TRUNCATE ledger.outbox_event"))
    outbox.add_many(25)
    light = measure()
    burden(outbox)
    assert measure() <= light + CLAIMED  # less than one more page per event: the indexes have one more level
