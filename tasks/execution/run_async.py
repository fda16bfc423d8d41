"""Run the tasks of an async handler: many at once, in one event loop of this process.

    the event loop    runs the handlers, each in a task of asyncio with its own soft limit
    one thread        settles tasks in groups, as they end, and claims others for the places that are free
    other threads     steps and sinks of the handlers: nothing waits for PostgreSQL on the event loop

When a task ends, its place is given to another due task of the same queue and type, so that a few slow tasks do not
hold up the others. That may be a task that has waited for a limit of the handler (`limits.py`). After `REFILL_SECONDS`,
or earlier if other types in the queue are waiting or the worker is about to end, no more are claimed, and the process
takes its next message when the last task has ended. A task that must run alone (docs/protocol.md, Poison) has the event
loop for itself.

Each running task has a lease of its own with the token of its claim, so that the heartbeat watches its hard limit and
its row. A task that was discarded or taken over is cancelled with `LeaseLost`. If the worker stops, all are cancelled
and released; outcomes that were not written yet are written first.

Tasks of one partition key run one after the other: the next one starts when the one before it was settled.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

from sqlalchemy.exc import SQLAlchemyError

from models.errors import CeleriacError, Unreachable
from sinks.task_sinks import TaskSinks
from tasks.core.async_steps import AsyncSteps
from tasks.core.lease import HeldLease, WatchedTask
from tasks.core.outcomes import Finish, Outcome
from tasks.core.steps import Steps
from tasks.core.task import Task
from tasks.execution.async_sinks import AsyncSinks
from tasks.execution.call_handler import call_async_handler
from tasks.execution.claim import Claim
from tasks.execution.daemon_threads import DaemonThreads
from tasks.execution.event_loop import LoopWatch, event_loop, interruptible
from tasks.execution.hard_limits import forget_limit, note_limit
from tasks.execution.limits import has_places
from tasks.execution.run import NOT_ITS_TURN, claim_is_ended, decide_outside, finish_outside, lease_is_held
from tasks.execution.settle import STOP_SECONDS, settle
from tasks.execution.stopping import what_stops
from tasks.execution.time_limits import soft_limit
from tasks.execution.worker_end import worker_ends

logger = logging.getLogger(__name__)

REFILL_SECONDS: Final = 300.0  # how long free places are filled with other tasks
FIRST_LOOK_SECONDS: Final = 0.05  # between two looks for due tasks while there are none
LONGEST_LOOK_SECONDS: Final = 1.0
GOODBYE_SECONDS: Final = 1.0  # for handlers to clean up when the worker stops
STEP_THREADS: Final = 4

Refill = Callable[[int], Claim | None]


def run_async(claim: Claim, refill: Refill | None = None) -> None:
    """Run every task of the claim, and beside them other due tasks. `refill` claims at most so many others."""
    loop = event_loop()
    with Threads(are_shared=not claim.is_visible) as threads, LoopWatch(loop, claim.handler.type) as watch:
        run = AsyncRun(claim, refill, threads)
        watch.find_task = run.find_task
        driving = loop.create_task(run.drive())
        try:
            interruptible(loop.run_until_complete, driving)
        except BaseException:
            run.stop(loop, driving)
            raise
        finally:
            forget_limit()


class Threads:
    """The threads that wait for the ledger on behalf of an event loop.

    In a user's test all tasks share one connection, so there is one thread for everything (`are_shared`).
    """

    def __init__(self, *, are_shared: bool) -> None:
        self._settling = DaemonThreads(1, name="async-settle")
        self._steps = self._settling if are_shared else DaemonThreads(STEP_THREADS, name="async-step")
        self._stop = threading.Event()
        self._current: Future[Any] | None = None  # what the settling thread does, or has done last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Start nothing new, and let the settling thread end what it does unless it waits for the ledger."""
        self._stop.set()
        self._settling.shutdown(wait=False, cancel_futures=True)
        self._steps.shutdown(wait=False, cancel_futures=True)
        if self._current is not None:
            wait([self._current], STOP_SECONDS)

    @property
    def are_stopping(self) -> bool:
        return self._stop.is_set()

    def pause(self, seconds: float) -> None:
        """Wait, or raise if the worker stops."""
        if self._stop.wait(seconds):
            raise Unreachable

    async def settle(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the settling thread."""
        self._current = self._settling.submit(function, *arguments)
        return await asyncio.wrap_future(self._current)

    async def step(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function in a thread for steps and sinks."""
        return await asyncio.get_running_loop().run_in_executor(self._steps, partial(function, *arguments, **options))


@dataclass(slots=True, eq=False)
class Running:
    """A task whose handler runs, or has ended and is not settled yet."""

    claim: Claim
    task: Task
    lease: HeldLease
    sinks: TaskSinks
    result: Any = None
    error: BaseException | None = None
    coroutine: asyncio.Task[None] | None = None
    cancelled_by: Exception | None = None  # why we have cancelled it


class AsyncRun:
    """The tasks that run at once in this process, from the first claim until the last of them is settled."""

    def __init__(self, claim: Claim, refill: Refill | None, threads: Threads) -> None:
        self.handler = claim.handler
        self.refill = refill
        self.threads = threads
        self.claims: dict[int, tuple[Claim, ExitStack]] = {}  # those with unsettled tasks, by identity
        self.waiting: dict[Task, Claim] = {}  # claimed and not started
        self.running: dict[Task, Running] = {}  # in the order of their starts
        self.ended: list[Running] = []
        self.settling: list[Running] = []  # the settling thread has them
        must_run_alone = any(task.isolated for task in claim.tasks)
        self.refill_until = 0.0 if refill is None or must_run_alone else time.monotonic() + REFILL_SECONDS
        self.look_at = 0.0  # when to look for due tasks
        self.look_seconds = FIRST_LOOK_SECONDS
        self.something_ended = asyncio.Event()
        self._add(claim)

    async def drive(self) -> None:
        """Start handlers, settle what has ended, and fill free places, until nothing runs."""
        while True:
            await self._start_waiting()
            if self.ended:
                self.settling, self.ended = self.ended, []
                self.something_ended.clear()
                await self.threads.settle(self._settle_ended)
                self._note_limit()  # the write of a `Finish` has noted its own
                if has_places(self.handler):
                    self.look_at = 0.0  # a task may have been waiting for these places
            elif self._may_refill():
                await self._refill()
            elif self.running:
                await self._wait()
            else:
                return

    def stop(self, loop: asyncio.AbstractEventLoop, driving: asyncio.Task[None]) -> None:
        """Cancel all handlers, give them a moment to clean up, and release their tasks.

        It is called while the exception that ends the run is handled. A handler that has ended keeps its outcome,
        unless something is left to do in `Finish` or in a sink.
        """
        self.threads.stop()
        coroutines = [driving, *(each.coroutine for each in self.running.values() if each.coroutine is not None)]
        for coroutine in coroutines:
            coroutine.cancel()
        with suppress(BaseException):  # a second signal
            loop.run_until_complete(asyncio.wait(coroutines, timeout=GOODBYE_SECONDS))
        for coroutine in coroutines:
            if coroutine.done() and not coroutine.cancelled():
                coroutine.exception()  # otherwise asyncio logs that it was never retrieved
        for ended in (*self.settling, *self.ended):
            claim, task = ended.claim, ended.task
            if task in claim.unsettled and task not in claim.decided and not ended.sinks.has_open_work:
                with suppress(BaseException):  # the handler was stopped by the same signal
                    outcome = decide_outside(claim, ended.sinks, ended.result, ended.error)
                    if not isinstance(outcome, Finish):
                        claim.decided[task] = outcome
        for each in (*self.settling, *self.ended, *self.running.values()):
            if each.task not in each.claim.decided:
                each.sinks.abort()
        for _, context in list(self.claims.values()):
            context.__exit__(*sys.exc_info())

    def _add(self, claim: Claim) -> None:
        """Take responsibility for the tasks of a claim."""
        context = ExitStack()
        context.enter_context(claim_is_ended(claim))
        self.claims[id(claim)] = (claim, context)
        self.waiting |= dict.fromkeys(claim.tasks, claim)
        del claim.tasks[1:]  # otherwise one slow task would keep all others of its claim in memory

    async def _start_waiting(self) -> None:
        """Start the claimed tasks whose turn it is. Those behind a task that did not succeed are released."""
        blocked: list[tuple[Claim, Task, Outcome]] = []
        for task, claim in list(self.waiting.items()):
            if claim.is_blocked(task):
                blocked.append((claim, task, NOT_ITS_TURN))
            elif claim.has_predecessor(task):
                continue
            else:
                self._start(claim, task)
            del self.waiting[task]
        if blocked:
            await self.threads.settle(self._settle, blocked)

    def _start(self, claim: Claim, task: Task) -> None:
        loop = asyncio.get_running_loop()
        lease = HeldLease(claim.token, claim.lease.deadline, is_lost=claim.lease.is_lost)
        steps = Steps(claim.bind, task.id, lease)
        running = Running(claim, task, lease, TaskSinks(claim.bind, task, lease, steps))
        lease.watched = WatchedTask(task.id, lambda error: _call_soon(loop, self._cancel, running, error))
        given = replace(
            task, steps=AsyncSteps(steps, self.threads.step), sinks=AsyncSinks(running.sinks, self.threads.step)
        )
        self.running[task] = running
        running.coroutine = loop.create_task(self._call(running, given), name=f"{task.type} {task.id}")
        self._note_limit()

    def find_task(self, coroutine: asyncio.Task[Any]) -> Task | None:
        """Return the task whose handler this coroutine runs. The watch calls it while the loop stands still."""
        return next((each.task for each in self.running.values() if each.coroutine is coroutine), None)

    async def _call(self, running: Running, given: Task) -> None:
        """Call the handler and note what it returned or raised. Only what stops the worker is raised."""
        claim, task = running.claim, running.task
        with lease_is_held(claim, running.lease):
            try:
                running.result = await call_async_handler(claim, given, running.lease)
            except BaseException as error:
                is_cancelled = isinstance(error, asyncio.CancelledError)
                if what_stops(error) or (is_cancelled and self.threads.are_stopping):
                    raise
                running.error = running.cancelled_by if is_cancelled and running.cancelled_by else error
            finally:
                running.lease.watched = None
        claim.seconds[task] = claim.seconds.pop(given, 0.0)
        del self.running[task]
        self.ended.append(running)
        self.something_ended.set()
        self._note_limit()

    def _cancel(self, running: Running, error: Exception) -> None:
        if running.coroutine is not None and running.lease.watched is not None:
            running.cancelled_by = error
            running.coroutine.cancel()

    def _note_limit(self) -> None:
        """Tell the worker's main process when the first of these handlers must have ended."""
        seconds = self.handler.hard_limit_seconds
        for first in self.running.values():
            note_limit(first.lease.hard_limit_at or time.monotonic() + seconds, seconds)
            return
        forget_limit()

    def _settle_ended(self) -> None:
        """Settle the tasks that have ended. Runs in the settling thread."""
        outcomes: list[tuple[Claim, Task, Outcome]] = []
        for each in self.settling:
            each.claim.running = [each.task]
            outcome = decide_outside(each.claim, each.sinks, each.result, each.error)
            if isinstance(outcome, Finish):
                with soft_limit(self.handler.soft_limit_seconds) as each.claim.soft_limit:  # the one for this thread
                    finish_outside(each.claim, each.task, each.sinks, outcome)
            else:
                outcomes.append((each.claim, each.task, outcome))
        self._settle(outcomes)
        for each in self.settling:
            each.claim.committed_gids += each.sinks.close()
            each.error = None  # its traceback refers to the variables of the handler
        self.settling = []
        self._end_claims()

    def _settle(self, outcomes: Iterable[tuple[Claim, Task, Outcome]]) -> None:
        """Settle tasks, those of one claim together."""
        by_claim: dict[int, dict[Task, Outcome]] = {}
        for claim, task, outcome in outcomes:
            by_claim.setdefault(id(claim), {})[task] = outcome
        for key, some in by_claim.items():
            claim, _ = self.claims[key]
            claim.running = list(some)
            settle(claim, some, pause=self.threads.pause)

    def _end_claims(self) -> None:
        """End the claims that have no unsettled task."""
        for key, (claim, context) in list(self.claims.items()):
            if not claim.unsettled:
                del self.claims[key]
                context.close()

    @property
    def _free_places(self) -> int:
        return self.handler.batch - len(self.running) - len(self.waiting)

    def _may_refill(self) -> bool:
        now = time.monotonic()
        if worker_ends():
            self.refill_until = 0.0
        return self.look_at <= now < self.refill_until and self._free_places > 0

    async def _refill(self) -> None:
        """Claim tasks for the free places. If none are due, look again later, or never if nothing runs."""
        try:
            has_claimed = await self.threads.settle(self._claim_more, self._free_places)
        except (SQLAlchemyError, CeleriacError) as error:
            self.refill_until = 0.0
            reason = str(error).partition("\n")[0]
            logger.warning("No more tasks are claimed: %s", reason, extra={"event": "tasks_not_claimed"})
            return
        if has_claimed:
            self.look_seconds = FIRST_LOOK_SECONDS
        elif self.running or self.ended:
            self.look_at = time.monotonic() + self.look_seconds
            self.look_seconds = min(2 * self.look_seconds, LONGEST_LOOK_SECONDS)
        else:
            self.refill_until = 0.0

    def _claim_more(self, most: int) -> bool:
        """Claim other tasks, and return whether there were any. Runs in the settling thread.

        The claim is added here and not on the event loop: if the worker stops in between, `stop` must know of it.
        """
        assert self.refill is not None
        claim = self.refill(most)
        if claim is not None:
            self._add(claim)
        return claim is not None

    async def _wait(self) -> None:
        """Wait until a handler has ended, or until it is time to look for due tasks."""
        is_full = self._free_places <= 0 or time.monotonic() >= self.refill_until
        with suppress(TimeoutError):
            async with asyncio.timeout(None if is_full else max(0.0, self.look_at - time.monotonic())):
                await self.something_ended.wait()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function on the event loop, from another thread."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function, *arguments)
