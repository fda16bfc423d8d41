"""The lease protocol as a state machine: workers on real connections act in any order and are compared with a model.

The clock moves in whole hours and events become due at half hours, so the seconds that a run takes do not matter.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)
from sqlalchemy import Connection

from models.sql import sql
from outbox import lease
from tests.machines import run_machine
from tests.outbox.table import OutboxTable

NAMES = ("a", "b", "b", "c")  # four connections; two of them are threads of one worker
DESTINATIONS = ("x", "y")
LEGAL = {  # the transitions that may be observed; a row is never deleted
    None: {"NEW"},
    "NEW": {"NEW", "RETRYING", "SENT", "DEAD"},
    "RETRYING": {"RETRYING", "SENT", "DEAD"},
    "SENT": {"SENT"},
    "DEAD": {"DEAD", "NEW"},
}
ALL = sql("SELECT * FROM ledger.outbox_event ORDER BY id")
LOCK = sql("SELECT id FROM ledger.outbox_event WHERE id = ANY(:ids) FOR UPDATE")
REQUEUE = sql("UPDATE ledger.outbox_event SET status = 'NEW', attempt_count = 0, last_error = NULL WHERE id = :id")
RESTART = sql("TRUNCATE ledger.outbox_event, ledger.ledger_clock RESTART IDENTITY")


@dataclass
class Row:
    """The expected state of an event."""

    destination: str
    created: int
    due: float = -math.inf
    key: str | None = None
    status: str = "NEW"
    attempts: int = 0
    holder: str | None = None
    token: uuid.UUID | None = None
    until: float = 0
    length: float = 0

    @property
    def unsent(self) -> bool:
        return self.status in ("NEW", "RETRYING")

    @property
    def since(self) -> float:
        return self.created if self.due == -math.inf else self.due

    def release(self) -> None:
        self.holder = self.token = None


@dataclass(frozen=True)
class Claimed:
    """What a worker remembers of a claim. It may be out of date."""

    worker: int
    token: uuid.UUID
    ids: tuple[int, ...]


workers = st.integers(0, len(NAMES) - 1)
hours = st.integers(0, 3)
claims: Bundle[Claimed] = Bundle("claims")
# How a worker writes: which rows of a claim, by token or by name, and whether it rolls back.
USE: dict[str, Any] = {
    "claimed": claims,
    "some": st.integers(1, 15),
    "with_token": st.booleans(),
    "undo": st.booleans(),
}


class Protocol(RuleBasedStateMachine):
    """One outbox, four workers, an operator, and a connection that holds row locks."""

    def __init__(self, outbox: OutboxTable, connections: list[Connection], seen: Counter[str]) -> None:
        super().__init__()
        self.outbox, self.connections, self.seen = outbox, connections, seen
        self.rows: dict[int, Row] = {}
        self.tokens: set[uuid.UUID] = set()
        self.statuses: dict[int, str] = {}
        self.now = 0
        with outbox.cluster.superuser.begin() as connection:
            connection.execute(RESTART)
        self.start = outbox.now()

    def teardown(self) -> None:
        for connection in self.connections:
            connection.rollback()

    def at(self, hour: float) -> datetime:
        return self.start + timedelta(hours=hour)

    @initialize()
    def begin(self) -> None:
        self.add("x", 3, None, None)
        self.add("y", 2, None, "k")

    @rule(
        destination=st.sampled_from(DESTINATIONS),
        count=st.integers(1, 3),
        wait=st.none() | hours,
        key=st.sampled_from((None, None, "k", "")),
    )
    def add(self, destination: str, count: int, wait: int | None, key: str | None) -> None:
        due = -math.inf if wait is None else self.now + wait - 0.5
        columns = {} if wait is None else {"next_retry_at": self.at(due)}
        for event in self.outbox.add_many(count, destination, ordering_key=key, **columns):
            self.rows[event] = Row(destination, self.now, due, key)

    @rule(
        target=claims,
        worker=workers,
        slept=st.integers(0, 2),
        limit=st.integers(1, 4),
        length=st.integers(0, 1),
        choice=st.integers(0, 8),
        data=st.data(),
    )
    def claim(self, *, worker: int, slept: int, limit: int, length: int, choice: int, data: st.DataObject) -> Any:
        self.time_passes(slept)
        only = {1: "x", 2: "y"}.get(choice)
        locked = set(data.draw(st.lists(st.sampled_from(sorted(self.rows)), max_size=2)))
        free = [i for i, row in self.rows.items() if self.is_claimable(i) and only in (None, row.destination)]
        expected = self.in_turn(set(free) - locked, limit)
        with self.outbox.engine.connect() as blocker:
            blocker.execute(LOCK, {"ids": list(locked)})
            got = lease.claim_outbox(self.connections[worker], NAMES[worker], limit, 3600 * (length + 0.5), only=only)
            blocker.rollback()
        assert sorted(event.id for event in got) == sorted(expected)
        self.seen["skipped a locked row"] += len(set(free) & locked)
        self.seen["claimed the head of a key"] += any(self.rows[event.id].key is not None for event in got)
        if not got:
            return multiple()
        (token,) = {event.lease_token for event in got}
        assert token not in self.tokens, "a token is never used twice"
        self.tokens.add(token)
        for event in got:
            row = self.rows[event.id]
            self.seen["reclaimed a lease"] += row.holder is not None
            self.seen["reclaimed its own lease"] += row.holder == NAMES[worker]
            assert row.holder is None or row.until <= self.now, "a live lease has one holder"
            assert (event.attempt_count, event.destination) == (row.attempts, row.destination)
            row.holder, row.token = NAMES[worker], token
            row.until, row.length = self.now + length + 0.5, length + 0.5
        return Claimed(worker, token, tuple(event.id for event in got))

    @rule(**USE)
    def ack(self, **use: Any) -> None:
        def effect(row: Row) -> None:
            row.status, row.due = "SENT", -math.inf
            row.release()

        self.write(lambda db, ids, **who: lease.ack_sent_many(db, dict.fromkeys(ids, "x"), **who), effect, **use)

    @rule(wait=hours, **USE)
    def fail(self, wait: int, **use: Any) -> None:
        due = self.now + wait - 0.5
        failure = ("refused", self.at(due))

        def effect(row: Row) -> None:
            row.status, row.due, row.attempts = "RETRYING", due, row.attempts + 1
            row.release()

        self.write(lambda db, ids, **who: lease.fail_retry_many(db, dict.fromkeys(ids, failure), **who), effect, **use)

    @rule(**USE)
    def bury(self, **use: Any) -> None:
        def effect(row: Row) -> None:
            row.status, row.due, row.attempts = "DEAD", -math.inf, row.attempts + 1
            row.release()

        self.write(lambda db, ids, **who: lease.mark_dead_many(db, dict.fromkeys(ids, "no"), **who), effect, **use)

    @rule(**USE)
    def renew(self, **use: Any) -> None:
        def effect(row: Row) -> None:
            row.until = self.now + row.length

        self.write(lease.renew_lease_many, effect, **use)

    @rule(**USE)
    def release(self, **use: Any) -> None:
        self.write(lease.release_lease_many, Row.release, **use)

    @rule(by=st.integers(1, 3))
    def time_passes(self, by: int) -> None:
        self.outbox.move_clock(3600 * by)
        self.now += by

    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        dead = [event for event, row in self.rows.items() if row.status == "DEAD"]
        if dead:
            event = data.draw(st.sampled_from(dead))
            with self.outbox.engine.begin() as connection:
                connection.execute(REQUEUE, {"id": event})
            before = self.rows[event]
            self.rows[event] = Row(before.destination, before.created, key=before.key)
            self.seen["requeued"] += 1

    @invariant()
    def the_table_equals_the_model(self) -> None:
        with self.outbox.engine.connect() as connection:
            found = {row.id: row for row in connection.execute(ALL)}
        assert found.keys() == self.rows.keys(), "no row is lost"
        for event, row in found.items():
            assert row.status in LEGAL[self.statuses.get(event)]
            self.statuses[event] = row.status
            model = self.rows[event]
            assert (row.status, row.attempt_count, row.destination) == (model.status, model.attempts, model.destination)
            assert (row.locked_by, row.lease_token) == (model.holder, model.token)
            assert row.next_retry_at == (None if model.due == -math.inf else self.at(model.due))
            if model.holder:
                drift = row.lease_until - self.at(model.until)
                assert timedelta(0) <= drift < timedelta(minutes=20)

    def is_claimable(self, event: int) -> bool:
        row = self.rows[event]
        free = row.unsent and row.due <= self.now and (row.holder is None or row.until <= self.now)
        if free and not self.is_head(event):
            self.seen["skipped a row behind its head"] += 1
            return False
        return free

    def is_head(self, event: int) -> bool:
        """Return whether every earlier event of its key is SENT."""
        this = self.rows[event]
        before = [row for i, row in self.rows.items() if i < event and row.status != "SENT"]
        return this.key is None or (this.destination, this.key) not in {(row.destination, row.key) for row in before}

    def in_turn(self, free: set[int], limit: int) -> list[int]:
        """Return the expected claim: longest waiting first; of the ordering keys those that sort first."""
        heads = sorted((self.rows[i].destination, key, i) for i in free if (key := self.rows[i].key) is not None)
        chosen = [i for name in DESTINATIONS for *_, i in [head for head in heads if head[0] == name][:limit]]
        chosen += [i for i in free if self.rows[i].key is None]
        return sorted(chosen, key=lambda i: (self.rows[i].since, i))[:limit]

    def is_held(self, event: int, claimed: Claimed, with_token: bool) -> bool:
        row = self.rows[event]
        authority = row.token == claimed.token if with_token else row.until > self.now
        return row.unsent and row.holder == NAMES[claimed.worker] and authority

    def write(
        self,
        statement: Callable[..., set[int]],
        effect: Callable[[Row], None],
        *,
        claimed: Claimed,
        some: int,
        with_token: bool,
        undo: bool,
    ) -> None:
        ids = [event for place, event in enumerate(claimed.ids) if some >> place & 1]
        held = {event for event in ids if self.is_held(event, claimed, with_token)}
        stale = {event for event in ids if self.rows[event].token != claimed.token}
        connection = self.connections[claimed.worker]
        token = claimed.token if with_token else None
        changed = statement(connection, ids[::-1], worker_id=NAMES[claimed.worker], lease_token=token)
        if with_token:
            assert not changed & stale, "a stale token writes nothing"
            self.seen["refused a stale token"] += len(stale)
            self.seen["refused a stale token of a live row"] += len([i for i in stale if self.rows[i].holder])
            self.seen["wrote after expiry"] += len([i for i in held if self.rows[i].until <= self.now])
        assert changed == held
        if undo:
            connection.rollback()
            return
        connection.commit()
        for event in held:
            effect(self.rows[event])


def run(outbox: OutboxTable, examples: int, steps: int) -> Counter[str]:
    seen = Counter[str]()
    connections = [outbox.connect(lock_timeout="100ms") for _ in NAMES]  # they act one at a time, so none waits
    run_machine(partial(Protocol, outbox, connections, seen), examples=examples, steps=steps)
    return seen


MUST_HAPPEN = (
    "reclaimed a lease",
    "reclaimed its own lease",
    "refused a stale token",
    "refused a stale token of a live row",
    "wrote after expiry",
    "skipped a locked row",
    "claimed the head of a key",
    "skipped a row behind its head",
    "requeued",
)


def test_in_any_order_of_actions_a_lease_has_one_holder_and_a_stale_token_writes_nothing(outbox: OutboxTable) -> None:
    seen = run(outbox, examples=20, steps=40)
    assert [what for what in MUST_HAPPEN if not seen[what]] == [], seen


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_in_long_runs_a_lease_has_one_holder_and_a_stale_token_writes_nothing(outbox: OutboxTable) -> None:
    seen = run(outbox, examples=500, steps=60)
    assert min(seen[what] for what in MUST_HAPPEN) > 100, seen
