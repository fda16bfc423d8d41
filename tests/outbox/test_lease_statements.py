"""What the protocol costs: one statement per batch, and a claim that does not feel its history."""

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
def said_to(connection: Connection) -> Iterator[list[str]]:
    """What goes to the server, by its first word."""
    said: list[str] = []

    def on_execute(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        said.append(statement.split(maxsplit=1)[0])

    def on_commit(_connection: Connection) -> None:
        said.append("COMMIT")

    event.listen(connection, "before_cursor_execute", on_execute)
    event.listen(connection, "commit", on_commit)
    try:
        yield said
    finally:
        event.remove(connection, "before_cursor_execute", on_execute)
        event.remove(connection, "commit", on_commit)


@each_operation
def test_a_batch_is_one_statement_and_an_empty_one_none(
    outbox: OutboxTable, db: Connection, operation: Operation
) -> None:
    ids = outbox.add_many(50)
    (token,) = {claimed.lease_token for claimed in claim_outbox(db, "me", 50)}
    with said_to(db) as said:
        operation.many(db, [], "me", token)
        assert said == []
        assert operation.many(db, ids, "me", token) == set(ids)
        assert said == ["WITH"]


def test_a_claim_is_one_statement_and_its_commit(outbox: OutboxTable, db: Connection) -> None:
    for name in "abc":
        outbox.add_many(5, name)
    with said_to(db) as said:
        assert len(claim_outbox(db, "me", 7)) == 7
        assert len(claim_outbox(db, "me", only=["b", "c"])) + len(claim_outbox(db, "me")) == 8
    assert said == ["WITH", "COMMIT"] * 3
    with Session(db) as session, said_to(db) as said:
        claim_outbox(session, "me")
    assert said == ["WITH", "COMMIT"]


def test_duplicates_of_a_batch_are_one_query(outbox: OutboxTable, db: Connection) -> None:
    with said_to(db) as said:
        check_dedup_many(db, [("a", str(n)) for n in range(200)])
    assert said == ["SELECT"]


def pages(connection: Connection, statement: Any, **values: Any) -> int:
    """How many pages a claim touches. It is not committed."""
    parameters = {
        "worker_id": "me",
        "limit": CLAIMED,
        "lease_seconds": 60,
        "lease_token": None,
        "without": [],
        **values,
    }
    explain = sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) {statement}".replace(":lease_token", "gen_random_uuid()"))
    explained: Any = connection.execute(explain, parameters).scalar_one()
    connection.rollback()
    plan = explained if isinstance(explained, list) else json.loads(explained)
    return int(plan[0]["Plan"]["Shared Hit Blocks"]) + int(plan[0]["Plan"]["Shared Read Blocks"])


def with_a_history(outbox: OutboxTable) -> dict[str, Any]:
    outbox.add_many(10_000, status="SENT", sent_at=outbox.now())
    outbox.add_many(10_000, next_retry_at=outbox.later(86_400))
    outbox.add_many(3_000)
    return {}


def with_a_dead_destination(outbox: OutboxTable) -> dict[str, Any]:
    for name in ("a dead one", "e dead one"):  # before and behind the one that is claimed
        outbox.add_many(10_000, name)
    return {"without": ["a dead one", "e dead one"]}


def with_a_long_key(outbox: OutboxTable) -> dict[str, Any]:
    outbox.add_many(10_000, ordering_key="k", next_retry_at=outbox.later(86_400))
    return {}


@pytest.mark.parametrize("statement", [CLAIM_ANY, CLAIM_GIVEN], ids=["any", "given"])
@pytest.mark.parametrize("burden", [with_a_history, with_a_dead_destination, with_a_long_key])
def test_a_claim_does_not_feel_what_it_does_not_claim(
    outbox: OutboxTable, statement: Any, burden: Callable[[OutboxTable], dict[str, Any]]
) -> None:
    def measured(**values: Any) -> int:
        with outbox.cluster.superuser.connect() as connection:
            connection.execute(sql("TRUNCATE ledger.ledger_clock; ANALYZE ledger.outbox_event"))
            connection.commit()
            least = [pages(connection, statement, only=["d"], **NO_FLOOR.values, **values) for _ in range(3)]
        return min(least)

    with outbox.cluster.superuser.begin() as connection:
        connection.execute(sql("TRUNCATE ledger.outbox_event"))
    outbox.add_many(25)
    light = measured()
    values = burden(outbox)
    assert measured(**values) <= light + 4 * CLAIMED  # the indexes have a level more
