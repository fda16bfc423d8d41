"""The processes of the chaos: workers, reclaims and recoveries that die as the plan says."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, Self

from sqlalchemy import NullPool, create_engine

import settings
from chaos.programs import NotInTime
from chaos.sink_places import KINDS
from chaos.sink_plan import RECLAIM, RECOVERY, Job, Plan
from models.engine import engine
from models.sql import sql
from sinks.recovery import recover
from tasks import NewTask, submit_many
from tasks.execution.deliver import deliver
from tasks.recovery.reclaim import reclaim_leases
from tasks.recovery.tick_rows import record_tick
from tasks.testing import forked_worker
from tasks.testing.clock import MOVE
from tasks.testing.forked_worker import Ending
from tasks.testing.windows import Window

WAVE: Final = 72  # processes that are killed at a window
AT_ONCE: Final = 4  # processes
NEW_TASKS: Final = 20  # submitted together, of one kind
AGAIN_SHARE: Final = 0.5  # of the deliveries, if a task waits for one
LAST_SHARE: Final = 0.5  # of the suspended workers: they go on when another one has run their task
LATER_KILL_SHARE: Final = 0.5  # of the suspended workers: they are killed when they have gone on
RANDOM_SECONDS: Final = 0.1  # a random moment comes before this
RARE_WAVES: Final = 5
DRAIN_ROUNDS: Final = 10
DRAIN_AT_ONCE: Final = 250  # tasks for one process
# A worker that is suspended here has an open transaction with the key of its effect: the next worker waits for it.
HOLDS_KEY: Final = ("keyed.before_effect", "keyed.before_commit")
WAITING: Final = sql("SELECT type, id FROM ledger.ingest_task WHERE status IN ('QUEUED', 'RETRYING') ORDER BY id")
CLEAN: Final = Job("no fault", None)
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Child:
    """A forked process, and what is to happen to it."""

    pid: int
    job: Job
    task_id: uuid.UUID | None = None
    suspended_at: Window | None = None


class Workers:
    """Starts processes and counts how they end."""

    def __init__(self, superuser_url: str, plan: Plan, *, shows_errors: bool = True) -> None:
        self.superuser = create_engine(superuser_url, poolclass=NullPool)
        self.plan = plan
        self.shows_errors = shows_errors
        self.crashes = 0
        self.suspensions = 0
        self.failed: list[str] = []  # processes that ended as none should
        self._suspended: dict[int, Child] = {}  # by pid
        self._new: dict[str, list[uuid.UUID]] = defaultdict(list)  # never delivered, by kind
        self._waiting: dict[str, list[uuid.UUID]] = defaultdict(list)  # to be delivered again

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._suspended:
            forked_worker.end(pid)

    def crash(self, crashes: int, report: Callable[[int], object], *, give_up_at: float) -> None:
        """Run waves until so many processes were killed."""
        while self.crashes < crashes:
            if time.monotonic() > give_up_at:
                raise NotInTime(f"Only {self.crashes} of {crashes} processes were killed in time.")
            self._wave(self.plan.deal(min(WAVE, crashes - self.crashes)))
            report(min(self.crashes, crashes))

    def crash_rare(self, fewest: int) -> None:
        """Run some more waves for windows that were hit less often than that."""
        for _ in range(RARE_WAVES):
            if not (rare := self.plan.rare(fewest)):
                return
            self._wave(rare)

    def drain(self) -> None:
        """Run everything that is left, without faults. A task that does not end is left to the check."""
        for _ in range(DRAIN_ROUNDS):
            self._clean_up()
            left = [*self._waiting.values(), *self._new.values()]
            self._new = defaultdict(list)
            if not any(left):
                return
            chunks = [ids[start : start + DRAIN_AT_ONCE] for ids in left for start in range(0, len(ids), DRAIN_AT_ONCE)]
            self._run(self._start(CLEAN, delivering(chunk)) for chunk in chunks)

    def _wave(self, jobs: Sequence[Job]) -> None:
        self._run(self._start_delivery(job) for job in jobs if job.kind in KINDS)
        self._expire_leases()
        self._run(self._start_doomed(job, reclaim) for job in jobs if job.kind == RECLAIM)
        self._run(self._start_doomed(job, recover_sinks) for job in jobs if job.kind == RECOVERY)
        self._clean_up()
        self._continue_suspended()

    def _start_delivery(self, job: Job) -> Child:
        waiting = self._waiting[job.kind]
        is_again = bool(waiting) and self.plan.chance.random() < AGAIN_SHARE
        task_id = waiting.pop() if is_again else self._take_new(job.kind)
        if not job.is_suspended:
            return self._start_doomed(job, delivering([task_id]), task_id)
        assert job.window is not None
        failpoints = job.window.failpoints("pause")
        later = self.plan.later_window(job)
        if later and later.name != job.window.name and self.plan.chance.random() < LATER_KILL_SHARE:
            failpoints += f";{later.failpoints('kill')}"
        else:
            later = None
        child = self._start(replace(job, window=later), delivering([task_id]), failpoints, task_id)
        return replace(child, suspended_at=job.window)

    def _start_doomed(self, job: Job, work: Work, task_id: uuid.UUID | None = None) -> Child:
        if job.window:
            return self._start(job, work, job.window.failpoints("kill"), task_id)
        seconds = self.plan.chance.uniform(0, RANDOM_SECONDS)
        return self._start(job, lambda: _killed_after(seconds, work), "", task_id)

    def _start(self, job: Job, work: Work, failpoints: str = "", task_id: uuid.UUID | None = None) -> Child:
        def quietly() -> None:
            logging.disable()  # warnings about lost leases are what we want
            if not self.shows_errors:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()

        return Child(forked_worker.start(quietly, failpoints=failpoints), job, task_id)

    def _run(self, children: Iterable[Child]) -> None:
        """Start these processes, a few at once, and wait for all."""
        running: deque[Child] = deque()
        for child in children:
            running.append(child)
            if len(running) == AT_ONCE:
                self._wait(running.popleft())
        while running:
            self._wait(running.popleft())

    def _wait(self, child: Child) -> None:
        ending: Ending = forked_worker.wait(child.pid)
        if ending.is_suspended:
            self._suspended[child.pid] = child
        elif ending.was_killed:
            self.crashes += 1
            self.plan.note_hit(child.job)
        elif ending.is_clean:
            self.plan.put_back(child.job)
        else:
            self.failed.append(f"{child.job if child.job is not CLEAN else 'without a fault'} ({ending})")

    def _clean_up(self) -> None:
        """Reclaim and recover without a fault, and read which tasks wait."""

        def tick() -> None:
            reclaim()
            recover_sinks()

        self._expire_leases()
        self._run([self._start(CLEAN, tick)])
        self._waiting.clear()
        new = {id_ for ids in self._new.values() for id_ in ids}
        with engine().connect() as connection:
            for type_, id_ in connection.execute(WAITING):
                if id_ not in new:
                    self._waiting[type_.removeprefix("chaos.")].append(id_)

    def _continue_suspended(self) -> None:
        """Let suspended workers go on, after another one has run their task, or while it does."""
        suspended = list(self._suspended.values())
        self.suspensions += len(suspended)
        waiting = {id_ for ids in self._waiting.values() for id_ in ids}
        taken_over = [child for child in suspended if child.task_id in waiting]
        first = [child for child in taken_over if self._may_come_last(child)]
        for child in taken_over:
            self._waiting[child.job.kind].remove(_task_of(child))
        if first:
            self._run([self._start(CLEAN, delivering([_task_of(child) for child in first]))])

        def go_on() -> Iterator[Child]:
            for child in suspended:
                if child in taken_over and child not in first:
                    yield self._start(CLEAN, delivering([_task_of(child)]))
                del self._suspended[child.pid]
                forked_worker.go_on(child.pid)
                yield child

        self._run(go_on())

    def _may_come_last(self, child: Child) -> bool:
        holds_key = child.suspended_at is not None and child.suspended_at.name in HOLDS_KEY
        return not holds_key and self.plan.chance.random() < LAST_SHARE

    def _expire_leases(self) -> None:
        """Move the clock beyond all leases, and record that reclaim has run, so that it does not extend them first."""
        lease = settings.current().ingest_lease_seconds
        with self.superuser.begin() as connection:
            connection.execute(MOVE, {"by": timedelta(seconds=lease + 1)})
            record_tick(connection, "reclaim", holder="chaos")

    def _take_new(self, kind: str) -> uuid.UUID:
        if not self._new[kind]:
            self._new[kind] = submit_tasks(kind, NEW_TASKS)
        return self._new[kind].pop()


def submit_tasks(kind: str, count: int) -> list[uuid.UUID]:
    with engine().begin() as connection:  # a plain connection: no thread of this process publishes wake-ups
        return [each.task_id for each in submit_many(connection, [NewTask(f"chaos.{kind}")] * count)]


def delivering(ids: Sequence[uuid.UUID]) -> Callable[[], None]:
    return lambda: deliver(engine(), ids)


def reclaim() -> None:
    reclaim_leases(engine(), settings.current())


def recover_sinks() -> None:
    recover(engine())


def _task_of(child: Child) -> uuid.UUID:
    assert child.task_id is not None
    return child.task_id


def _killed_after(seconds: float, work: Work) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
    work()
