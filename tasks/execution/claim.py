"""Claim: the tasks that this process may run now under one lease, from the claim until each of them is settled.

Every delivery is presumed a duplicate, and the claim decides what runs. A task belongs to the holder of the token in
its row; the lease is one row of `task_lease` for the whole batch. The claim is committed before a handler starts.
`heartbeat.py` renews the lease while the batch runs. `settle.py` names the token in every statement. When the lease is
lost, reclaim gives the tasks to others, and whatever the old holder still tries to write is refused and audited.

A `Claim` is the only object that is passed along the execution path. It records which of its tasks are not settled
yet, and which partition keys are blocked: tasks of one key run in their order, until one does not succeed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine

from models.driver_values import array, array_of_ids
from models.engine import Bind, autocommit
from models.ledger_outage import wait_for_ledger
from tasks.core import batch_size
from tasks.core.lease import HeldLease
from tasks.core.outcomes import Dead, Discarded, Isolated, Outcome, Released, Succeeded
from tasks.core.partition_keys import skipping
from tasks.core.registry import Handler
from tasks.core.result_metrics import count_outcomes
from tasks.core.task import Task
from tasks.execution.claim_statements import CLAIM, CLAIM_KEYED, CONTENTS, LOSSES
from tasks.execution.time_limits import SoftLimit

NOT_STARTED = Released("there was no time to start it")
ALONE_NEXT_TIME = Isolated("its batch was broken, and there was no time to run it alone")


@dataclass(slots=True)
class Claim:
    """The tasks of one lease, and the verdict on every other delivered id (`claim_statements.py`)."""

    lease: HeldLease
    tasks: list[Task] = field(default_factory=list)
    skipped: list[uuid.UUID] = field(default_factory=list)
    not_due: list[uuid.UUID] = field(default_factory=list)
    unhandled: list[uuid.UUID] = field(default_factory=list)
    left: list[uuid.UUID] = field(default_factory=list)
    keyed: list[uuid.UUID] = field(default_factory=list)
    next_in_line: list[uuid.UUID] = field(default_factory=list)

    # From here on: only while it runs. `begin` sets what has no default.
    bind: Bind = field(init=False, repr=False)
    handler: Handler = field(init=False, repr=False)
    soft_limit: SoftLimit = field(init=False, repr=False)
    stop_starting_at: float = field(init=False)  # no further task is started after this time
    half_a_lease_at: float = field(init=False)
    not_started: Outcome = NOT_STARTED  # what becomes of tasks that are not started
    unsettled: dict[Task, None] = field(default_factory=dict)
    decided: dict[Task, Outcome] = field(default_factory=dict)  # outcomes that are not written yet
    running: Sequence[Task] = ()
    seconds: dict[Task, float] = field(default_factory=dict)  # in the handler, the last time it was called
    seconds_outside: dict[Task, float] = field(default_factory=dict)  # before `Finish`, which belongs to the same call
    blocked_keys: dict[str, int] = field(default_factory=dict)  # from which `key_seq` on no task of the key may run

    @property
    def token(self) -> uuid.UUID:
        return self.lease.token

    def begin(self, bind: Bind, handler: Handler, *, lease_seconds: float) -> None:
        """Take these tasks into the hands of their handler."""
        self.bind = bind
        self.handler = handler
        self.soft_limit = SoftLimit(handler.soft_limit_seconds)
        self.half_a_lease_at = self.lease.deadline - lease_seconds / 2
        self.unsettled = dict.fromkeys(self.tasks)
        self.restart_clock()

    @property
    def is_visible(self) -> bool:
        """False in a user's test, whose transaction no other worker can see."""
        return isinstance(self.bind, Engine)

    @property
    def is_out_of_time(self) -> bool:
        return time.monotonic() >= self.stop_starting_at

    @property
    def half_a_lease_is_over(self) -> bool:
        return time.monotonic() >= self.half_a_lease_at

    def restart_clock(self) -> None:
        """Stop starting tasks after a second, so that other workers share a slow batch; after half a lease for sure."""
        self.stop_starting_at = self.half_a_lease_at
        if self.is_visible and not self.handler.many:
            self.stop_starting_at = min(self.half_a_lease_at, time.monotonic() + batch_size.STOP_SECONDS)

    def restore(self, tasks: Sequence[Task]) -> None:
        """Give the tasks back the payload and context with which they were submitted; a handler may change them."""

        def read() -> dict[uuid.UUID, tuple[Any, Any]]:
            with autocommit(self.bind) as connection:
                found = connection.execute(CONTENTS, {"ids": array_of_ids(task.id for task in tasks)})
                return {id_: (payload, context or {}) for id_, payload, context in found}

        contents = wait_for_ledger(read)
        for task in tasks:
            task.payload, task.context = contents.get(task.id, (task.payload, task.context))

    def count_losses(self, task: Task, message: str) -> int:
        """Return how often in a row this task was released with this message before."""

        def read() -> int:
            with autocommit(self.bind) as connection:
                return int(connection.execute(LOSSES, {"id": task.id, "message": message}).scalar_one())

        return wait_for_ledger(read)

    def add_seconds(self, tasks: Sequence[Task], seconds: float) -> None:
        """Record how long the handler took for these tasks."""
        each = seconds / len(tasks) + self.seconds_outside.get(tasks[0], 0.0)
        self.seconds |= dict.fromkeys(tasks, each)
        batch_size.record_duration(self.handler, each)

    def mark_settled(self, outcomes: Mapping[Task, Outcome], settled: Mapping[Task, Outcome]) -> None:
        """Remove these tasks. Those that are not in `settled` belong to another holder now."""
        for task in outcomes:
            del self.unsettled[task]
            self.decided.pop(task, None)
            if not self._makes_way(settled.get(task)):
                self.block_key_behind(task)
        count_outcomes(settled, self.seconds)

    def block_key_behind(self, task: Task) -> None:
        """Let no later task of the same partition key run in this claim."""
        if task.partition_key is not None:
            place = task.key_seq or 0
            self.blocked_keys[task.partition_key] = min(place, self.blocked_keys.get(task.partition_key, place))

    def is_blocked(self, task: Task) -> bool:
        """Return True if a task before it in its partition key did not succeed."""
        return task.partition_key in self.blocked_keys and (task.key_seq or 0) > self.blocked_keys[task.partition_key]

    def has_predecessor(self, task: Task) -> bool:
        """Return True if an unsettled task of this claim comes before it in its partition key."""
        return task.partition_key is not None and any(
            other.partition_key == task.partition_key and (other.key_seq or 0) < (task.key_seq or 0)
            for other in self.unsettled
        )

    def _makes_way(self, outcome: Outcome | None) -> bool:
        """Return True if the next task of the partition key may run. None: another holder decides."""
        return isinstance(outcome, Succeeded | Discarded) or (isinstance(outcome, Dead) and self.handler.skip_dead)


def claim(
    connection: Connection,
    ids: Sequence[str | uuid.UUID],
    *,
    handlers: Mapping[str, Handler],
    holder: str,
    lease_seconds: float,
    token: uuid.UUID | None = None,
    keyed: bool = False,
    durable: bool = False,
    batch_of: Callable[[Handler], int] = batch_size.batch_to_claim,
) -> Claim:
    """Claim a batch; the caller commits, if the connection does not do so by itself.

    `keyed` claims tasks that have a partition key, in the order of their keys. `durable`: the claim is on disk when it
    is committed, whatever the handler. A caller that gives a new `token` knows what was claimed even if this never
    returns.
    """
    lease = HeldLease(token or uuid.uuid4(), time.monotonic() + lease_seconds)  # the deadline is taken before the claim
    values = {
        "ids": array_of_ids(ids),
        "types": array(handlers),
        "batches": array(batch_of(handler) for handler in handlers.values()),
        "relaxed": array(handler.transactional and not durable for handler in handlers.values()),
        "token": lease.token,
        "holder": holder,
        "lease_seconds": lease_seconds,
    }
    if keyed:
        values["skipping"] = skipping(handlers)
    found = _sort((CLAIM_KEYED if keyed else CLAIM).rows(connection, values), lease)
    if keyed:
        found.tasks.sort(key=lambda task: task.key_seq or 0)
        found.not_due.extend(found.next_in_line)
    return found


def task_from_row(row: Sequence[Any]) -> Task:
    """Return the task of a row that begins with `claim_statements.columns`."""
    return Task(row[0], row[1], row[2], row[3] or {}, *row[4:13])


def _sort(rows: Iterable[Sequence[Any]], lease: HeldLease) -> Claim:
    found = Claim(lease)
    others = {
        "SKIPPED": found.skipped,
        "NOT_DUE": found.not_due,
        "UNHANDLED": found.unhandled,
        "LEFT": found.left,
        "KEYED": found.keyed,
        "NEXT": found.next_in_line,
    }
    for row in rows:
        if row[-1] == "RUN":
            found.tasks.append(task_from_row(row))
        else:
            others[row[-1]].append(row[0])
    return found
