"""Tasks as a state machine: workers, reclaim and operators act in any order, and a model predicts the result.

Claim, batch, settling, reclaim and requeue are production's, on real connections; the table of effects has no unique
key. Time moves in whole hours and everything is due at half hours, so the speed of the machine does not matter.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from sqlalchemy import Engine, make_url
from sqlalchemy.orm import Session

import settings
from models.engine import make_engine
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import NewTask, submit_many
from tasks.core.outcomes import Outcome, Succeeded
from tasks.core.registry import find
from tasks.core.task import Task
from tasks.execution import claim, run
from tasks.execution.heartbeat import RENEW
from tasks.execution.settle import write_outcomes
from tasks.execution.transaction import handler_session
from tasks.operations import dead_tasks
from tasks.recovery.reclaim import reclaim_leases
from tasks.recovery.tick_rows import record_tick
from tests.machines import run_machine
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import clean_sink, handled, run_claim
from tests.tasks.task_model import (
    BACKOFF,
    BATCHES,
    ERRORS,
    HOUR,
    MAX_ATTEMPTS,
    OPEN,
    OUTCOMES,
    Row,
    admitted,
    check_history,
)
from tests.tasks.work import insert

LEASE = HOUR / 2
RESTART = sql("""
    TRUNCATE ledger.ingest_task, ledger.ingest_task_transition, ledger.task_lease, ledger.task_audit,
             ledger.outbox_event, ledger.ledger_clock, ledger.tick, public.test_sink RESTART IDENTITY
""")
LOCK = sql("SELECT FROM ledger.ingest_task WHERE id = ANY(:ids) FOR UPDATE")
# Each task with its history, whether task and history were last changed in one commit, and whether it was woken then.
ALL = sql("""
    SELECT task.*, history.transitions, history.attempts, history.transaction = task.xmin::text AS is_one_commit,
           (SELECT count(*) FROM public.test_sink WHERE task_id = task.id) AS effects,
           EXISTS (SELECT FROM ledger.outbox_event wakeup WHERE wakeup.created_at = task.updated_at
                   AND wakeup.payload -> 'ids' ? task.id::text
                   AND coalesce(wakeup.next_retry_at, '-infinity')
                       IN (coalesce(task.next_retry_at, '-infinity'), '-infinity')) AS is_woken
    FROM ledger.ingest_task task CROSS JOIN LATERAL (
        SELECT array_agg(concat(from_status, '>', to_status) ORDER BY id) AS transitions,
               array_agg(attempt_count ORDER BY id) AS attempts,
               (array_agg(xmin::text ORDER BY id DESC))[1] AS transaction
        FROM ledger.ingest_task_transition WHERE task_id = task.id) AS history""")
LEASES = sql("SELECT token, task_ids FROM ledger.task_lease")
AUDITS = sql("SELECT count(*) FROM ledger.task_audit")
ISOLATED = sql("SELECT isolated FROM ledger.ingest_task WHERE id = :id")


@dataclass(frozen=True)
class Claimed:
    """A claim as a worker remembers it; its lease may have been lost since."""

    claim: claim.Claim

    @property
    def token(self) -> uuid.UUID:
        return self.claim.token

    @property
    def tasks(self) -> list[Task]:
        return self.claim.tasks


# With a clock that stands still: on a busy machine a batch would take longer than a second, and release its rest.
pytestmark = [pytest.mark.usefixtures("known_handlers", "clock"), pytest.mark.timeout(600)]
claims: Bundle[Claimed] = Bundle("claims")


class Life(RuleBasedStateMachine):
    """Some tasks, three workers, reclaim, an operator, and a session that holds locks."""

    def __init__(self, stack: ServersOfTests, engine: Engine, seen: Counter[str]) -> None:
        super().__init__()
        self.stack, self.engine, self.seen = stack, engine, seen
        self.connections = [engine.connect() for _ in range(3)]
        self.rows: dict[uuid.UUID, Row] = {}
        self.leases: dict[uuid.UUID, float] = {}
        self.tokens: set[uuid.UUID] = set()
        self.audits = self.now = 0
        self.plan: dict[uuid.UUID, str] = {}
        self.reclaim_in_the_middle = False
        self.error_in_the_middle: BaseException | None = None
        ALIVE[:] = [self]
        assert after_commit_publisher().wait_until_idle(20)
        with stack.cluster.superuser.begin() as connection:
            connection.execute(RESTART)

    def teardown(self) -> None:
        for connection in self.connections:
            connection.close()

    @initialize()
    def begin(self) -> None:
        self.submit("machine.three", 4)
        self.submit("machine.four", 3)

    @rule(type=st.sampled_from(list(BATCHES)), count=st.integers(1, 3))
    def submit(self, type: str, count: int) -> None:
        with Session(self.engine) as db:
            for submitted in submit_many(db, [NewTask(type, max_attempts=MAX_ATTEMPTS)] * count):
                self.rows[submitted.task_id] = Row(type)
            db.commit()

    @rule(target=claims, worker=st.integers(0, 2), slept=st.integers(0, 2), data=st.data())
    def claim(self, worker: int, slept: int, data: st.DataObject) -> Any:
        self.time_passes(slept)
        all_ids = sorted(self.rows)
        ids = data.draw(st.lists(st.sampled_from(all_ids), min_size=1, max_size=6, unique=True))
        return self.claimed(worker, ids, set(data.draw(st.lists(st.sampled_from(all_ids), max_size=2))))

    def claimed(self, worker: int, ids: list[uuid.UUID], locked: set[uuid.UUID]) -> Any:
        expected, left = admitted(self.rows, ids, locked, self.now)
        with self.engine.connect() as locking:
            locking.execute(LOCK, {"ids": list(locked)})
            connection = self.connections[worker]
            known = {type: find(type) for type in BATCHES}
            got = claim.claim(connection, ids, handlers=known, holder=f"worker:{worker}", lease_seconds=LEASE)
            connection.commit()
            locking.rollback()
        assert {task.id for task in got.tasks} == expected
        assert (got.left, got.unhandled) == (left, [])
        assert set(got.not_due) == {i for i in ids if self.rows[i].status in OPEN and self.rows[i].due > self.now}
        assert {*got.skipped, *got.not_due, *got.left} == set(ids) - expected
        self.seen["skipped a locked task"] += len(locked & set(got.skipped))
        self.seen["filled a batch"] += bool(expected - set(ids))
        if not got.tasks:
            return multiple()
        assert got.token not in self.tokens, "a token was used twice"
        self.tokens.add(got.token)
        self.leases[got.token] = self.now + LEASE / HOUR
        for task in got.tasks:
            row = self.rows[task.id]
            assert task.attempt_count == row.attempts, "a claim changed the number of attempts"
            self.seen["ran alone"] += row.isolated
            row.is_claimed(got.token)
        return Claimed(got)

    @rule(claimed=claims, some=st.integers(1, 15), outcome=st.sampled_from(list(OUTCOMES)), undo=st.booleans())
    def settle(self, claimed: Claimed, some: int, outcome: str, undo: bool) -> None:
        tasks = [task for place, task in enumerate(claimed.tasks) if some >> place & 1]
        held = self.held(claimed, tasks)
        with Session(self.engine) as db:
            is_last = held == self.held(claimed, claimed.tasks)
            done = self.write(claimed, db, dict.fromkeys(tasks, OUTCOMES[outcome]), is_last=is_last)
            db.rollback() if undo else db.commit()
        assert {task.id for task in done} == held, "a stale token was accepted, or a valid one refused"
        self.seen["refused a stale token"] += len(tasks) - len(held)
        self.seen["refused a stale token of a running task"] += len(
            [task for task in tasks if task.id not in held and self.rows[task.id].token]
        )
        self.seen["expired but not reclaimed"] += bool(held) and self.leases[claimed.token] <= self.now
        if not undo:
            for id_ in held:
                self.rows[id_].settles(outcome, self.now)
            self.forget(claimed.token, ended=is_last)

    @rule(target=claims, claimed=claims, outcome=st.sampled_from(list(OUTCOMES)))
    def oversleep(self, claimed: Claimed, outcome: str) -> Any:
        """Let the lease expire and another worker claim its tasks; only then the first one settles."""
        self.time_passes(1)
        self.reclaim()
        self.time_passes(1)
        another = self.claimed(2, [task.id for task in claimed.tasks], set())
        self.settle(claimed, 15, outcome, undo=False)
        return another

    @rule(claimed=claims)
    def bury(self, claimed: Claimed) -> None:
        """Let the tasks of a claim die; then requeue one dead task and discard another."""
        self.settle(claimed, 15, "die", undo=False)
        dead = sorted(id_ for id_, row in self.rows.items() if row.status == "DEAD")
        for id_, discard in zip(dead, (False, True), strict=False):
            self.decide([id_], discard)

    @rule(claimed=claims, some=st.integers(1, 15))
    def succeed(self, claimed: Claimed, some: int) -> None:
        """Write effects and SUCCEEDED in one transaction: all of them or none."""
        tasks = [task for place, task in enumerate(claimed.tasks) if some >> place & 1] or claimed.tasks
        held = self.held(claimed, tasks)
        is_last = held == self.held(claimed, claimed.tasks)
        with handler_session(self.engine) as db:
            for task in tasks:
                insert(task, db)
            outcomes: dict[Task, Outcome] = dict.fromkeys(tasks, Succeeded())
            if len(self.write(claimed, db, outcomes, is_last=is_last, in_batch=True)) == len(tasks):
                db.commit_batch()
        if len(held) == len(tasks):
            for id_ in held:
                self.rows[id_].settles("succeed", self.now)
            self.forget(claimed.token, ended=is_last)
        else:
            self.seen["rolled effects back"] += 1

    @rule(claimed=claims, data=st.data())
    def run(self, claimed: Claimed, data: st.DataObject) -> None:
        """Run a claim as a worker does: together, and one by one after a failure."""
        outcomes = st.sampled_from(["succeed", "succeed", "succeed", *ERRORS])
        self.plan = {task.id: data.draw(outcomes) for task in claimed.tasks}
        run_claim(claimed.claim)
        held = self.held(claimed, claimed.tasks)
        self.audits += len(claimed.tasks) - len(held)
        self.seen["ran late and was refused"] += len(claimed.tasks) - len(held)
        for id_ in held:
            self.rows[id_].settles(self.plan[id_], self.now)
        self.forget(claimed.token, ended=True)

    @rule(claimed=claims)
    def run_and_lose_it_in_the_middle(self, claimed: Claimed) -> None:
        """Let the lease expire and be reclaimed while the handler runs; the handler continues."""
        self.plan = dict.fromkeys((task.id for task in claimed.tasks), "succeed")
        self.reclaim_in_the_middle = True
        run_claim(claimed.claim)
        if self.error_in_the_middle:
            raise self.error_in_the_middle
        assert not self.reclaim_in_the_middle, "the handler was not called"
        self.audits += len(claimed.tasks)
        self.seen["was reclaimed in the middle"] += 1

    def handle(self, task: Task, db: Session) -> None:
        """Run as the handler of every type."""
        insert(task, db)
        if self.reclaim_in_the_middle:
            self.reclaim_in_the_middle = False
            try:
                self.time_passes(1)
                self.reclaim()
            except BaseException as error:  # otherwise it would be the outcome of the task, which is refused here
                self.error_in_the_middle = error
                raise
        if self.plan[task.id] in ERRORS:
            raise ERRORS[self.plan[task.id]]

    @rule(claimed=claims)
    def renew(self, claimed: Claimed) -> None:
        with self.engine.begin() as connection:
            kept = connection.execute(RENEW, {"tokens": [claimed.token], "lease_seconds": LEASE}).all()
        assert kept == [(claimed.token, True)] * (claimed.token in self.leases)
        if kept:
            self.leases[claimed.token] = self.now + LEASE / HOUR

    @rule(by=st.integers(1, 3))
    def time_passes(self, by: int) -> None:
        move(self.stack, HOUR * by)
        self.now += by

    @rule()
    def reclaim(self) -> None:
        with self.engine.begin() as connection:
            record_tick(connection, "reclaim", holder="test")  # otherwise it would extend expired leases first
        found = reclaim_leases(self.engine, settings.current())
        lost = [token for token, until in self.leases.items() if until <= self.now]
        assert found.leases == len(lost)
        for token in lost:
            rows = [row for row in self.rows.values() if row.token == token]
            self.seen["charged for a lost worker"] += len(rows) == 1
            self.seen["isolated for a lost worker"] += len(rows) > 1
            for row in rows:
                row.settles("fail" if len(rows) == 1 else "isolate", self.now)
            del self.leases[token]

    @rule(data=st.data(), discard=st.booleans())
    def operate(self, data: st.DataObject, discard: bool) -> None:
        dead = sorted(id_ for id_, row in self.rows.items() if row.status == "DEAD")
        if not dead:
            return
        self.decide(data.draw(st.lists(st.sampled_from(dead), min_size=1, unique=True)), discard)

    def decide(self, ids: list[uuid.UUID], discard: bool) -> None:
        command = dead_tasks.discard if discard else dead_tasks.requeue
        done = list(command(self.engine, dead_tasks.Choice(ids=ids), actor="operator"))
        assert sorted(id_ for batch in done for id_ in batch) == sorted(ids)
        self.seen["discarded" if discard else "requeued"] += 1
        for id_ in ids:
            self.rows[id_].settles("discard" if discard else "requeue", self.now)
            with self.engine.connect() as connection:  # the model does not know which error killed it
                self.rows[id_].isolated = connection.execute(ISOLATED, {"id": id_}).scalar_one()

    @invariant()
    def the_ledger_is_what_the_model_says(self) -> None:
        with self.engine.connect() as connection:
            found = {row.id: row for row in connection.execute(ALL)}
            leases = {row.token: set(row.task_ids) for row in connection.execute(LEASES)}
            audits = connection.execute(AUDITS).scalar_one()
        assert found.keys() == self.rows.keys(), "a task is lost"
        assert leases.keys() == self.leases.keys(), "a lease must end with its last task"
        assert audits == self.audits
        for id_, row in found.items():
            model = self.rows[id_]
            assert (row.status, row.attempt_count, row.lease_token) == (model.status, model.attempts, model.token)
            assert row.effects == model.effects == (row.status == "SUCCEEDED"), "an effect is missing or doubled"
            assert row.isolated == model.isolated
            model.due_at = row.next_retry_at
            assert row.is_one_commit, "a change and its transition are not in one commit"
            assert len(row.transitions) == model.changes
            assert row.attempts[-1] == row.attempt_count
            assert row.is_woken or row.status not in OPEN, "it became runnable without a wake-up"
            if row.status == "RUNNING":
                assert id_ in leases[row.lease_token], "it runs without a lease"
            check_history(row.transitions)

    def held(self, claimed: Claimed, tasks: list[Task]) -> set[uuid.UUID]:
        return {task.id for task in tasks if self.rows[task.id].token == claimed.token}

    def forget(self, token: uuid.UUID, *, ended: bool) -> None:
        if ended:
            self.leases.pop(token, None)

    def write(self, claimed: Claimed, db: Any, outcomes: dict[Task, Outcome], **how: Any) -> dict[Task, Outcome]:
        return write_outcomes(db, outcomes, token=claimed.token, handler=find(claimed.tasks[0].type), **how)


ALIVE: list[Life] = []  # the machine that is running


def handle(task: Task, db: Session) -> None:
    ALIVE[0].handle(task, db)


@pytest.fixture
def engine(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine with a lock timeout: one step happens at a time, so a statement never has to wait for a lock.

    The heartbeat's thread is off, because `renew` is a rule of the machine. The thread would renew leases when the
    model does not expect it, and interrupt handlers in the middle of `reclaim`.
    """
    monkeypatch.setattr(run, "lease_is_held", lambda _claim, lease: nullcontext(lease))
    url = make_url(settings.current().database_url).update_query_dict({"options": "-c lock_timeout=2s"})
    made = make_engine(url.render_as_string(hide_password=False))
    with clean_sink(), ExitStack() as handlers:
        for type, batch in BATCHES.items():
            waits = [hours * HOUR for hours in BACKOFF]
            handlers.enter_context(handled(type, handle, batch=batch, backoff=waits))
        yield made
    made.dispose()


def live(stack: ServersOfTests, engine: Engine, *, examples: int, steps: int) -> Counter[str]:
    seen = Counter[str]()
    run_machine(partial(Life, stack, engine, seen), examples=examples, steps=steps)
    return seen


MUST_HAPPEN = (
    *("skipped a locked task", "filled a batch", "ran alone"),
    "refused a stale token",
    "refused a stale token of a running task",
    "expired but not reclaimed",
    "rolled effects back",
    "ran late and was refused",
    "was reclaimed in the middle",
    "charged for a lost worker",
    "isolated for a lost worker",
    "requeued",
    "discarded",
)


def test_every_effect_happens_once_whatever_workers_reclaim_and_operators_do(
    stack: ServersOfTests, engine: Engine
) -> None:
    seen = live(stack, engine, examples=30, steps=40)
    assert [what for what in MUST_HAPPEN if not seen[what]] == [], seen


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_effect_happens_once_for_much_longer(stack: ServersOfTests, engine: Engine) -> None:
    seen = live(stack, engine, examples=400, steps=60)
    assert min(seen[what] for what in MUST_HAPPEN) > 50, seen
