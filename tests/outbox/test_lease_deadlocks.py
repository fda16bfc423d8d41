"""Concurrent batches that share rows and name them in opposite orders wait for each other and never deadlock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import cycle

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from models.sql import sql
from outbox.lease import claim_outbox
from tests.outbox.operations import OPERATIONS
from tests.outbox.table import OutboxTable

ROWS = 30
THREADS = 4
# These settings make a plan likely that locks rows in the given order, and find a deadlock in 20 ms instead of 1 s.
NAIVE = {
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_seqscan": "off",
    "jit": "off",
    "deadlock_timeout": "20ms",
}
# LATERAL locks the rows one by one in the given order. An UPDATE … FROM unnest would leave the order to the planner.
UNORDERED = sql("""
    SELECT count(*) FROM unnest(CAST(:ids AS bigint[])) AS given(id) CROSS JOIN LATERAL (
        SELECT FROM ledger.outbox_event WHERE id = given.id FOR UPDATE) AS event
""")
Batch = Callable[[Connection, Sequence[int]], object]


class Rack:
    """Run batches in threads at the same time: all need one row, which stays locked until every batch waits for it."""

    def __init__(self, outbox: OutboxTable) -> None:
        self.outbox = outbox
        self.gate = outbox.superuser()
        self.connections = [outbox.superuser() for _ in range(THREADS)]  # only a superuser may set deadlock_timeout
        for connection in self.connections:
            connection.detach()
            for name, value in NAIVE.items():
                connection.execute(sql(f"SET {name} = '{value}'"))
            connection.commit()
        self.deadlocks = 0
        self.batches = 0

    def run(self, batches: Sequence[tuple[Batch, Sequence[int]]], shared: int) -> None:
        self.gate.execute(sql("SELECT 1 FROM ledger.outbox_event WHERE id = :id FOR UPDATE"), {"id": shared})
        running = [
            self.outbox.in_thread(self._deadlocks, connection, batch, ids)
            for connection, (batch, ids) in zip(self.connections, batches, strict=True)
        ]
        self.outbox.wait_until_blocked(*self.connections)
        self.gate.rollback()
        self.deadlocks += sum(one.result(30) for one in running)
        self.batches += len(running)

    @staticmethod
    def _deadlocks(connection: Connection, batch: Batch, ids: Sequence[int]) -> bool:
        try:
            batch(connection, ids)
        except OperationalError as error:
            if getattr(error.orig, "pgcode", None) != "40P01":
                raise
            return True
        finally:
            connection.rollback()  # so that the next round finds the rows held
        return False


@pytest.fixture
def rack(outbox: OutboxTable) -> Rack:
    return Rack(outbox)


def orders(rng: random.Random, ids: Sequence[int], shared: int) -> list[list[int]]:
    """Return one batch per thread, ascending, descending and random, each with the shared row in its middle."""
    below, above = [i for i in ids if i < shared], [i for i in ids if i > shared]
    up = [*below, shared, *above]
    mixed = [sorted([shared, *rng.sample(below, 10), *rng.sample(above, 10)], reverse=down) for down in (False, True)]
    return [up, up[::-1], *mixed]


def test_a_thousand_overlapping_batches_in_opposite_orders_do_not_deadlock(
    outbox: OutboxTable, rack: Rack, db: Connection
) -> None:
    ids = outbox.add_many(ROWS)
    (token,) = {event.lease_token for event in claim_outbox(db, "me", ROWS)}
    rng = random.Random(1)
    operations = cycle(OPERATIONS)

    def batch(connection: Connection, given: Sequence[int]) -> None:
        assert next(operations).many(connection, given, "me", token) == set(given)

    while rack.batches < 1000:
        shared = ids[ROWS // 2]
        rack.run([(batch, given) for given in orders(rng, ids, shared)], shared)
    assert (rack.batches, rack.deadlocks) == (1000, 0)


def test_the_rack_finds_deadlocks_of_statements_that_lock_in_the_given_order(outbox: OutboxTable, rack: Rack) -> None:
    """Without this, the test above would prove nothing."""
    ids = outbox.add_many(ROWS)

    def batch(connection: Connection, given: Sequence[int]) -> None:
        connection.execute(UNORDERED, {"ids": given})

    for _ in range(3):
        rack.run([(batch, given) for given in orders(random.Random(1), ids, ids[15])], ids[15])
    assert rack.deadlocks >= 3
