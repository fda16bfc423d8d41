"""Partition keys as a state machine: submits, claims, failures, lost workers and operators in any order.

After each step the ledger must agree with the model: a claim takes the tasks that the model allows, in the order of
their key, with one holder per key at a time; every effect happened once and in order; and a task that became the first
of its key was woken.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from sqlalchemy.orm import Session

import settings
from models.engine import engine
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import Discard, NewTask, Permanent, Snooze, submit_many
from tasks.core.registry import handlers
from tasks.core.task import Task
from tasks.execution.claim import Claim, claim
from tasks.operations import dead_tasks
from tasks.recovery.reclaim import reclaim_leases
from tests.machines import run_machine
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import handled, run_claim
from tests.tasks.key_model import BATCHES, MAX_ATTEMPTS, OPEN, SKIPS, WAIT, Turn, admitted, head, in_order
from tests.tasks.lost_workers import later
from tests.tasks.work import insert, wakeups

HOUR = 3600
LEASE = HOUR / 2
KEYS = ("a", "b", "c")
RESTART = sql("""
    TRUNCATE ledger.ingest_task, ledger.ingest_task_transition, ledger.task_lease, ledger.task_audit,
             ledger.outbox_event, ledger.ledger_clock, ledger.tick, public.test_sink RESTART IDENTITY
""")
ALL = sql("SELECT id, status, attempt_count, lease_token, isolated, partition_key, key_seq FROM ledger.ingest_task")
EFFECTS = sql("SELECT task_id FROM public.test_sink ORDER BY ctid")
ERRORS = {
    "fail": RuntimeError("no"),
    "die": Permanent("never"),
    "snooze": Snooze(WAIT * HOUR),
    "discard": Discard("old"),
}

# With a clock that stands still: on a busy machine a batch would take longer than a second, and release its rest.
pytestmark = [pytest.mark.usefixtures("known_handlers", "clock"), pytest.mark.timeout(600)]
claims: Bundle[Claim] = Bundle("claims")


class Keys(RuleBasedStateMachine):
    """Three keys with two types of tasks, workers that die, and an operator."""

    def __init__(self, stack: ServersOfTests, seen: Counter[str]) -> None:
        super().__init__()
        self.stack, self.seen = stack, seen
        self.turns: dict[uuid.UUID, Turn] = {}
        self.plan: dict[uuid.UUID, str] = {}
        self.heads: dict[str, uuid.UUID] = {}
        self.now = self.places = self.last_wakeup = 0
        ALIVE[:] = [self]
        assert after_commit_publisher().wait_until_idle(20)
        with stack.cluster.superuser.begin() as connection:
            connection.execute(RESTART)

    @initialize()
    def begin(self) -> None:
        for key, type in zip(KEYS, [*BATCHES, SKIPS], strict=True):
            self.submit(key, type, 3)

    @rule(key=st.sampled_from(KEYS), type=st.sampled_from(list(BATCHES)), count=st.integers(1, 4))
    def submit(self, key: str, type: str, count: int) -> None:
        with Session(engine()) as db:
            new = [NewTask(type, partition_key=key, max_attempts=MAX_ATTEMPTS)] * count
            for submitted in submit_many(db, new):
                self.turns[submitted.task_id] = Turn(type, key, self.place())
            db.commit()

    @rule(target=claims, data=st.data(), slept=st.integers(0, 1))
    def claim(self, data: st.DataObject, slept: int) -> Any:
        if not self.turns:
            return multiple()
        self.time_passes(slept)
        ids = data.draw(st.lists(st.sampled_from(sorted(self.turns)), min_size=1, max_size=6, unique=True))
        heads = [found for key in KEYS if (found := head(self.turns, key))]
        ids += [id_ for id_ in heads if id_ not in ids and data.draw(st.booleans())]
        expected = admitted(self.turns, ids, self.now)
        with engine().connect() as connection:
            got = claim(connection, ids, handlers=handlers(), holder="worker:1", lease_seconds=LEASE, keyed=True)
            connection.commit()
        assert [task.id for task in got.tasks] == expected
        assert {*got.skipped, *got.not_due, *got.left} == set(ids) - set(expected)
        if not got.tasks:
            return multiple()
        self.seen["batch was filled"] += bool(set(expected) - set(ids))
        self.seen["several keys at once"] += len({task.partition_key for task in got.tasks}) > 1
        for id_ in expected:
            self.turns[id_].status, self.turns[id_].token = "RUNNING", got.token
        return got

    @rule(claim=consumes(claims), data=st.data())
    def run(self, claim: Claim, data: st.DataObject) -> None:
        """Run a claim as a worker does; its lease may have been lost."""
        outcomes = st.sampled_from(["succeed"] * 5 + list(ERRORS))
        self.runs(claim, {task.id: data.draw(outcomes) for task in claim.tasks})

    @rule(claim=claims, discard=st.booleans())
    def bury(self, claim: Claim, discard: bool) -> None:
        """Let all tasks of a claim die; then an operator requeues or discards all dead tasks."""
        self.runs(claim, dict.fromkeys((task.id for task in claim.tasks), "die"))
        self.decide([id_ for id_, turn in self.turns.items() if turn.status == "DEAD"], discard)

    def runs(self, claim: Claim, plan: dict[uuid.UUID, str]) -> None:
        self.plan = plan
        run_claim(claim)
        blocked: set[str] = set()
        for task in claim.tasks:
            turn = self.turns[task.id]
            if turn.token != claim.token:
                self.seen["late"] += 1
                blocked.add(turn.key)
            elif turn.key in blocked:
                self.seen["released behind another"] += 1
                turn.becomes("QUEUED")
            else:
                self.settles(turn, self.plan[task.id])
                if turn.blocks:
                    blocked.add(turn.key)

    def settles(self, turn: Turn, outcome: str) -> None:
        self.seen[outcome] += 1
        match outcome:
            case "succeed":
                turn.becomes("SUCCEEDED", due=-math.inf)
            case "snooze":
                turn.becomes("RETRYING", due=self.now + WAIT)
            case "discard":
                turn.becomes("DISCARDED")
            case _:
                turn.fails(self.now, for_good=outcome == "die")

    @rule()
    def workers_are_lost(self) -> None:
        later(self.stack, HOUR)
        self.now += 1
        reclaim_leases(engine(), settings.current())
        for token in {turn.token for turn in self.turns.values() if turn.token}:
            lost = [turn for turn in self.turns.values() if turn.token == token]
            self.seen["lost alone" if len(lost) == 1 else "lost with others"] += 1
            for turn in lost:
                if len(lost) == 1:
                    turn.fails(self.now)
                else:
                    turn.isolated = True
                    turn.becomes("RETRYING", due=self.now)

    @rule(data=st.data(), discard=st.booleans())
    def operate(self, data: st.DataObject, discard: bool) -> None:
        dead = sorted(id_ for id_, turn in self.turns.items() if turn.status == "DEAD")
        if dead:
            self.decide(data.draw(st.lists(st.sampled_from(dead), min_size=1, unique=True)), discard)

    def decide(self, ids: list[uuid.UUID], discard: bool) -> None:
        command = dead_tasks.discard if discard else dead_tasks.requeue
        list(command(engine(), dead_tasks.Choice(ids=ids), actor="operator"))
        for id_ in sorted(ids, key=lambda id_: self.turns[id_].seq):
            turn = self.turns[id_]
            if discard:
                self.seen["discarded by an operator"] += 1
                turn.becomes("DISCARDED")
                continue
            self.seen["requeued at the end" if turn.type == SKIPS else "requeued in its place"] += 1
            turn.attempts, turn.isolated = 0, bool(self.isolated(id_))
            turn.becomes("QUEUED", due=-math.inf)
            if turn.type == SKIPS:
                turn.seq = self.place()

    @rule(by=st.integers(0, 1))
    def time_passes(self, by: int) -> None:
        move(self.stack, HOUR * by)
        self.now += by

    def place(self) -> int:
        self.places += 1
        return self.places

    def isolated(self, id_: uuid.UUID) -> Any:
        with engine().connect() as connection:
            return connection.execute(
                sql("SELECT isolated FROM ledger.ingest_task WHERE id = :id"), {"id": id_}
            ).scalar_one()

    @invariant()
    def the_ledger_is_what_the_model_says(self) -> None:
        with engine().connect() as connection:
            found = {row.id: row for row in connection.execute(ALL)}
            effects = list(connection.execute(EFFECTS).scalars())
        assert found.keys() == self.turns.keys()
        for id_, row in found.items():
            turn = self.turns[id_]
            assert (row.status, row.attempt_count) == (turn.status, turn.attempts)
            assert (row.lease_token, row.isolated) == (turn.token, turn.isolated)
        for key in KEYS:
            ids = in_order(self.turns, key)
            assert sorted(ids, key=lambda id_: found[id_].key_seq) == ids, "the order differs from the model's"
            running = [turn for turn in map(self.turns.__getitem__, ids) if turn.token]
            assert len({turn.token for turn in running}) <= 1, "a key has two holders"
        done = {id_ for id_, turn in self.turns.items() if turn.status == "SUCCEEDED"}
        assert sorted(effects) == sorted(done), "an effect is missing, doubled, or without SUCCEEDED"
        by_key: dict[str, list[int]] = defaultdict(list)
        for id_ in effects:
            by_key[self.turns[id_].key].append(self.turns[id_].seq)
        assert all(places == sorted(places) for places in by_key.values()), "effects are out of order"

    @invariant()
    def a_task_that_became_the_first_of_its_key_was_woken(self) -> None:
        first = {key: id_ for key in KEYS if (id_ := head(self.turns, key)) and self.turns[id_].status in OPEN}
        woken = list(wakeups(f"id > {self.last_wakeup}"))
        for key, id_ in first.items():
            if self.heads.get(key) != id_:
                assert any(id_ in wakeup.ids for wakeup in woken), "it was not woken"
                self.seen["woken for its turn"] += 1
        self.heads = first
        self.last_wakeup = max((wakeup.id for wakeup in woken), default=self.last_wakeup)

    def handle(self, task: Task, db: Session) -> None:
        insert(task, db)
        if self.plan[task.id] in ERRORS:
            raise ERRORS[self.plan[task.id]]


ALIVE: list[Keys] = []  # the machine that is running


def handle(task: Task, db: Session) -> None:
    ALIVE[0].handle(task, db)


@pytest.fixture(autouse=True)
def keyed_handlers(ledger: ServersOfTests) -> Iterator[None]:
    with ExitStack() as registered:
        for type, batch in BATCHES.items():
            how = {"batch": batch, "skip_dead": type == SKIPS, "backoff": [WAIT * HOUR]}
            registered.enter_context(handled(type, handle, **how))
        yield


def live(stack: ServersOfTests, *, examples: int, steps: int) -> Counter[str]:
    seen = Counter[str]()
    run_machine(partial(Keys, stack, seen), examples=examples, steps=steps)
    return seen


MUST_HAPPEN = (
    "batch was filled", "several keys at once", "late", "released behind another", "lost alone", "lost with others",
    "fail", "requeued at the end", "requeued in its place", "discarded by an operator", "woken for its turn",
)  # fmt: skip


def test_keys_stay_in_order_and_no_task_waits_for_ever_whatever_happens(ledger: ServersOfTests) -> None:
    seen = live(ledger, examples=10, steps=35)
    assert [what for what in MUST_HAPPEN if not seen[what]] == [], seen


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_keys_stay_in_order_for_much_longer(ledger: ServersOfTests) -> None:
    seen = live(ledger, examples=200, steps=60)
    assert min(seen[what] for what in MUST_HAPPEN) > 10, seen
