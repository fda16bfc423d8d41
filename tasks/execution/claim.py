"""Claim: the tasks that this process may run now under one lease, from the claim until each of them is settled.

Every delivery is presumed a duplicate, and the claim decides what runs. A claim writes one lease, a row of `task_lease`
with a random token, for the whole batch, and the same token into each of its tasks; only a process that knows the token
may settle them. The claim is committed before a handler starts. `heartbeat.py` renews the lease while the batch runs.
`settle.py` names the token in every statement. When the lease was not renewed in time, `recovery/reclaim.py` takes the
tasks away from this process. Whatever it still tries to write is then refused, and recorded as an audit.

A `Claim` is the only object that is passed along the execution path. It records which of its tasks are not settled
yet, and which partition keys are blocked: tasks of one key run in their order, and when one does not make way, those
behind it do not run.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, Engine

from models.driver_values import array, array_of_ids
from models.engine import Bind, autocommit
from models.ledger_outage import wait_for_ledger
from sinks.task_sinks import TaskSinks
from tasks.core import batch_size
from tasks.core.lease import HeldLease
from tasks.core.outcomes import Dead, Discarded, Isolated, Outcome, Released, Succeeded
from tasks.core.partition_keys import skipping
from tasks.core.registry import Handler
from tasks.core.task import Task
from tasks.execution.announcements import announce, drop_errors
from tasks.execution.claim_statements import (
    CLAIM,
    CLAIM_ADMITTED,
    CLAIM_KEYED,
    CLAIM_KEYED_ADMITTED,
    CONTENTS,
    LOSSES,
)
from tasks.execution.task_events import NOTHING, report_started
from tasks.execution.thread_limits import ThreadLimit
from tasks.execution.time_limits import SoftLimit, soft_limit

NOT_STARTED = Released("there was no time to start it")
ALONE_NEXT_TIME = Isolated("its batch was broken, and there was no time to run it alone")


@dataclass(slots=True)
class Claim:
    """The tasks of one lease, and the verdict on every other delivered id (`claim_statements.py`)."""

    lease: HeldLease
    tasks: list[Task] = field(default_factory=list)
    skipped: list[uuid.UUID] = field(default_factory=list)
    not_due: list[uuid.UUID] = field(default_factory=list)
    paused: list[uuid.UUID] = field(default_factory=list)
    unhandled: list[uuid.UUID] = field(default_factory=list)
    left: list[uuid.UUID] = field(default_factory=list)
    keyed: list[uuid.UUID] = field(default_factory=list)
    limited: list[uuid.UUID] = field(default_factory=list)
    next_in_line: list[uuid.UUID] = field(default_factory=list)
    kinds: dict[uuid.UUID, tuple[str, str]] = field(default_factory=dict)  # queue and type of ids that do not run

    # The fields below are used while the tasks run. `begin` sets those without a default.
    bind: Bind = field(init=False, repr=False)
    handler: Handler = field(init=False, repr=False)
    soft_limit: SoftLimit | ThreadLimit = field(init=False, repr=False)
    stop_starting_at: float = field(init=False)  # no further task is started after this time
    half_a_lease_at: float = field(init=False)
    not_started: Outcome = NOT_STARTED  # the outcome of tasks for which there is no time left
    unsettled: dict[Task, None] = field(default_factory=dict)  # a set that keeps the order
    decided: dict[Task, Outcome] = field(default_factory=dict)  # outcomes that are not written yet
    running: Sequence[Task] = ()  # the tasks of the current transaction or call; empty while a transaction is opened
    seconds: dict[Task, float] = field(default_factory=dict)  # how long the last call of the handler took for the task
    seconds_outside: dict[Task, float] = field(default_factory=dict)  # the part of them before `Finish.write` began
    prepared: dict[Task, TaskSinks] = field(default_factory=dict)  # transactions in sinks that wait for a decision
    committed_gids: list[str] = field(default_factory=list)  # of those, what sinks have committed
    blocked_keys: dict[str, int] = field(default_factory=dict)  # partition key → no task after this `key_seq` may run
    followed: Collection[Task] = NOTHING  # their outcomes are reported to Flower, if it listens

    @property
    def token(self) -> uuid.UUID:
        return self.lease.token

    def begin(self, bind: Bind, handler: Handler, *, lease_seconds: float) -> None:
        """Prepare to run these tasks with this handler."""
        self.bind = bind
        self.handler = handler
        self.soft_limit = soft_limit(handler.soft_limit_seconds)
        self.half_a_lease_at = self.lease.deadline - lease_seconds / 2
        self.unsettled = dict.fromkeys(self.tasks)
        self.restart_clock()
        self.followed = report_started(self.tasks)

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
        """Set the time after which no further task is started.

        It is a second from now, so that other workers share a slow batch, and never later than half a lease. For a
        batch handler, and in a user's test, only the half lease counts.
        """
        self.stop_starting_at = self.half_a_lease_at
        if self.is_visible and not self.handler.many:
            self.stop_starting_at = min(self.half_a_lease_at, time.monotonic() + batch_size.STOP_SECONDS)

    def extend_clock(self, seconds: float) -> None:
        """Allow for time in which no task could start, but never beyond half a lease."""
        self.stop_starting_at = min(self.half_a_lease_at, self.stop_starting_at + seconds)

    def restore(self, tasks: Sequence[Task]) -> None:
        """Read payload and context of these tasks again: a handler that was rolled back may have changed them."""

        def read() -> dict[uuid.UUID, tuple[Any, Any]]:
            with autocommit(self.bind) as connection:
                found = connection.execute(CONTENTS, {"ids": array_of_ids(task.id for task in tasks)})
                return {id_: (payload, context or {}) for id_, payload, context in found}

        contents = wait_for_ledger(read)
        for task in tasks:
            task.payload, task.context = contents.get(task.id, (task.payload, task.context))

    def count_losses(self, tasks: Sequence[Task], message: str) -> int:
        """Return how often in a row one of these tasks was released with this message, up to now."""

        def read() -> int:
            with autocommit(self.bind) as connection:
                values = {"ids": array_of_ids(task.id for task in tasks), "message": message}
                return int(connection.execute(LOSSES, values).scalar_one())

        return wait_for_ledger(read)

    def add_seconds(self, tasks: Sequence[Task], seconds: float) -> None:
        """Record how long the handler took for these tasks."""
        each = seconds / len(tasks) + self.seconds_outside.get(tasks[0], 0.0)
        self.seconds |= dict.fromkeys(tasks, each)
        batch_size.record_duration(self.handler, each)

    def mark_settled(self, outcomes: Mapping[Task, Outcome], settled: Mapping[Task, Outcome]) -> None:
        """Remove tasks that were to be settled. Those not in `settled` were taken over or discarded."""
        for task in outcomes:
            del self.unsettled[task]
            self.decided.pop(task, None)
            if not self._makes_way(settled.get(task)):
                self.block_key_behind(task)
        announce(settled, self.followed, self.seconds)
        drop_errors(outcomes.values())
        for task in outcomes:
            self.seconds.pop(task, None)

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
    admitted: bool = False,
    batch_of: Callable[[Handler], int] = batch_size.batch_to_claim,
) -> Claim:
    """Claim a batch. The caller commits, unless the connection is in autocommit mode.

    `keyed` claims tasks that have a partition key, in their order. `durable` waits until the claim is on disk, also for
    a transactional handler. `admitted`: these tasks have passed the limits of their handler, which is the only one in
    `handlers` (`limits.py`). A caller that gives a new `token` can find out what was claimed even if this call fails.
    """
    lease = HeldLease(token or uuid.uuid4(), time.monotonic() + lease_seconds)  # the deadline is taken before the claim
    values = {
        "ids": array_of_ids(ids),
        "types": array(handlers),
        "batches": array(batch_of(handler) for handler in handlers.values()),
        "relaxed": array(handler.transactional and not durable for handler in handlers.values()),
        "limited": array(handler.limits is not None and not admitted for handler in handlers.values()),
        "token": lease.token,
        "holder": holder,
        "lease_seconds": lease_seconds,
    }
    if keyed:
        values["skipping"] = skipping(handlers)
    if admitted:
        values["limit_by"] = next((each.limits.limit_by for each in handlers.values() if each.limits), None)
    found = _by_verdict(_STATEMENTS[keyed, admitted].rows(connection, values), lease)
    if keyed:
        found.tasks.sort(key=lambda task: task.key_seq or 0)
        found.not_due.extend(found.next_in_line)  # they are counted as not due
    return found


_STATEMENTS: Final = {
    (False, False): CLAIM,
    (True, False): CLAIM_KEYED,
    (False, True): CLAIM_ADMITTED,
    (True, True): CLAIM_KEYED_ADMITTED,
}


def task_from_row(row: Sequence[Any]) -> Task:
    """Return the task of a row with `claim_statements.columns` and, if it was just claimed, the seconds it waited."""
    return Task(row[0], row[1], row[2], row[3] or {}, *row[4:15])


def _by_verdict(rows: Iterable[Sequence[Any]], lease: HeldLease) -> Claim:
    """Return a claim with each row in the list of its verdict."""
    found = Claim(lease)
    others = {
        "SKIPPED": found.skipped,
        "NOT_DUE": found.not_due,
        "PAUSED": found.paused,
        "UNHANDLED": found.unhandled,
        "LEFT": found.left,
        "KEYED": found.keyed,
        "LIMITED": found.limited,
        "NEXT": found.next_in_line,
    }
    for row in rows:
        if row[-1] == "RUN":
            found.tasks.append(task_from_row(row))
        else:
            others[row[-1]].append(row[0])
            found.kinds[row[0]] = (row[4] or "", row[1] or "")  # empty if there is no such task
    return found
