"""Running a claimed batch: together if all goes well, one by one if not, so that a bad task costs nobody but itself.

    together    one transaction: every handler's effects, every SUCCEEDED, every transition (P3)
    one by one  after anything else than success of all: ROLLBACK, the culprit is settled with what became of it, and
                the others run in a transaction each
    outside     a handler that is not transactional: one by one, each settled right after it ran; what it leaves to
                `Finish` is written in the transaction that settles it

Tasks of one partition key run in their order, and the first that does not succeed ends that: what comes after it is
given back (P9).

Settling must return exactly the tasks that ran. One fewer means that its lease was lost: everything is rolled back, and
what is still ours runs one by one. After a second (`pace.py`), and after half a lease for sure, no further task is
started; what is done is settled, the rest is given back (P6). When the connection is lost, nobody knows whether the
COMMIT went through: the fence does, and what is still ours goes back, to be run alone (P5). `unsettled.py` keeps the
books.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from failpoint import failpoint
from models.driver_values import array_of_ids
from models.engine import Bind, autocommit
from models.errors import Unreachable
from models.prepared_statements import was_dropped
from settings import Settings
from tasks.core import batch_size
from tasks.core.lease import HeldLease, WatchedTask
from tasks.core.outcomes import (
    DONE,
    SENTENCE_LIMIT,
    Dead,
    ErrorCode,
    Failure,
    Finish,
    Isolated,
    Outcome,
    Released,
    Retry,
    Snoozed,
    Succeeded,
    outcome_of,
)
from tasks.core.registry import Handler
from tasks.core.steps import Steps
from tasks.core.task import Task
from tasks.execution.claim import GIVEN, Claim
from tasks.execution.heartbeat import heartbeat
from tasks.execution.run_handler import Repeat, call, call_outside, is_serialization_failure
from tasks.execution.settle import Outcomes, Settlement
from tasks.execution.settle_statements import NO_SUCH_CURSOR
from tasks.execution.time_limits import SoftLimit
from tasks.execution.transaction import HandlerSession, LedgerLost, TransactionMisused, handler_session
from tasks.execution.unsettled import REPEATS, Unsettled

logger = logging.getLogger(__name__)

NO_TIME: Final = Released("there was no time to start it")
ALONE_NEXT_TIME: Final = Isolated("its batch was broken, and there was no time to run it alone")
NOT_ITS_TURN: Final = Released("a task before it in its partition key did not succeed")
NOT_BEGUN: Final = Snoozed(1.0, "its batch could not begin")
TOO_OFTEN: Final = Snoozed(1.0, "the database asked too often for a repetition")


@dataclass(frozen=True, slots=True)
class Broken:
    """A transaction that was rolled back, and whose fault it was, where that is known."""

    culprit: tuple[Task, Outcome] | None = None

    @classmethod
    def by(cls, tasks: Sequence[Task], outcome: Outcome) -> Broken:
        """One of them. Of several nobody knows which."""
        return cls((tasks[0], outcome)) if len(tasks) == 1 else cls()


def _finishing(handler: Handler, finish: Finish) -> Handler:
    """The last part of a handler that ran outside, as a transactional one."""

    def write(_task: Task, db: Session) -> Any:
        left = finish.write(db)
        if isinstance(left, Coroutine | Generator):
            left.close()
            raise TypeError("What is left to Finish is async or a generator, and calling it does nothing.")
        return finish.result

    return replace(handler, transactional=True, function=write)


class Batch:
    """One claim in the hands of its handler."""

    def __init__(self, engine: Bind, claim: Claim, handler: Handler, settings: Settings) -> None:
        self.engine = engine
        self.claim = claim
        self.handler = handler
        self.limit = SoftLimit(handler.soft_limit_seconds)
        self.half_a_lease_at = claim.deadline - settings.ingest_lease_seconds / 2
        self.stop_starting_at = self._stop_starting_at()
        self.unsettled = Unsettled(engine, claim, Settlement(claim.token, handler, settings))
        self.running: Sequence[Task] = ()
        self.no_time: Outcome = NO_TIME  # what becomes of those that are not started
        self.outside: dict[Task, float] = {}  # seconds before `Finish`, which belong to the same call

    def run(self) -> None:
        held: HeldLease | None = None
        with ExitStack() as stack:
            try:
                held = stack.enter_context(self._holding())
                stack.enter_context(self.limit)
                if self.handler.transactional and len(self.claim.tasks) > 1:
                    self._together(held)
                self._one_by_one(held)
            except (SystemExit, KeyboardInterrupt) as stopped:
                given_back = Released(f"the worker stopped: {type(stopped).__name__}")
                self.unsettled.give_back([(task, given_back) for task in self.unsettled])
                raise
            except (LedgerLost, Unreachable) as error:
                logger.warning("the ledger was lost: %s", error)
                self.unsettled.give_back(self._blamed(error, ErrorCode.LEDGER_LOST))
            except Exception as error:  # a fault of ours
                given_up = self._blamed(error, ErrorCode.HANDLER_ERROR)
                self.unsettled.give_back(given_up if held else [(task, NOT_BEGUN) for task in self.unsettled])
                raise

    def _stop_starting_at(self) -> float:
        """A slow batch shares what it has not begun."""
        if self.handler.many:
            return self.half_a_lease_at
        return min(self.half_a_lease_at, time.monotonic() + batch_size.STOP_SECONDS)

    def _holding(self) -> AbstractContextManager[HeldLease]:
        return heartbeat().holding(self.claim.token, self.claim.deadline)

    def _together(self, held: HeldLease) -> None:
        """Afterwards all are settled, or the culprit is, if one is known.

        Not one that ran after others of its partition key: what it saw of them was rolled back, so it has yet to run
        in its turn (P9).
        """
        broken = self._attempt(self.claim.tasks, self.handler, held)
        if broken is None:
            return
        if broken.culprit and not self.unsettled.is_behind(broken.culprit[0]):
            self.unsettled.settle(*broken.culprit)
        elif time.monotonic() >= self.half_a_lease_at:
            self.no_time = ALONE_NEXT_TIME  # or the same tasks would come together again, for ever
        self._begin_again(list(self.unsettled))

    def _begin_again(self, tasks: Sequence[Task]) -> None:
        """With time of their own, and as they were submitted: a handler may change what it is given."""
        self.stop_starting_at = self._stop_starting_at()
        try:
            with autocommit(self.engine) as connection:
                given = connection.execute(GIVEN, {"ids": array_of_ids(task.id for task in tasks)})
                contents = {id_: (payload, context or {}) for id_, payload, context in given}
        except DBAPIError as error:
            raise LedgerLost from error
        for task in tasks:
            task.payload, task.context = contents.get(task.id, (task.payload, task.context))

    def _one_by_one(self, held: HeldLease) -> None:
        for task in self.unsettled:
            if len(self.claim.tasks) > 1 and time.monotonic() >= self.stop_starting_at:
                self.unsettled.give_back([(each, self.no_time) for each in self.unsettled])
                return
            self._alone(task, held)

    def _alone(self, task: Task, held: HeldLease) -> None:
        if self.unsettled.is_held_up(task):
            self.unsettled.settle(task, NOT_ITS_TURN)
        elif self.handler.transactional:
            self._inside(task, self.handler, held)
        else:
            self._outside(task, held)

    def _inside(self, task: Task, handler: Handler, held: HeldLease) -> None:
        match self._attempt([task], handler, held):
            case Broken(culprit=(_, outcome)):
                self.unsettled.settle(task, outcome)
            case Broken():
                self.unsettled.lost(task, DONE)

    def _outside(self, task: Task, held: HeldLease) -> None:
        """No transaction is open while its handler runs; how long that takes is between it and its limits."""
        self.running = [task]
        held.watched = WatchedTask(task.id, self.limit.interrupter_of_next_call())
        with_steps = replace(task, steps=Steps(self.engine, task.id, held))
        started_at = time.monotonic()
        try:
            outcome = call_outside(self.handler, with_steps, held, self.limit)
        finally:
            held.watched = None
            self.outside[task] = self.unsettled.seconds[task] = time.monotonic() - started_at
        if isinstance(outcome, Finish):
            self._inside(task, _finishing(self.handler, outcome), held)
        else:
            batch_size.record_duration(self.handler, self.unsettled.seconds[task])
            self.unsettled.settle(task, outcome)

    def _attempt(self, tasks: Sequence[Task], handler: Handler, held: HeldLease) -> Broken | None:
        """One transaction, repeated if the database asks for it. None: committed."""
        for _ in range(REPEATS):
            try:
                return self._transaction(tasks, handler, held)
            except Repeat:
                self._begin_again(tasks)
        return Broken.by(tasks, TOO_OFTEN)

    def _transaction(self, tasks: Sequence[Task], handler: Handler, held: HeldLease) -> Broken | None:
        ran: list[tuple[Task, Outcome]] = []
        self.running = ()
        with handler_session(self.engine) as db:
            self.running = tasks
            for group in [tasks] if handler.many else [[task] for task in tasks]:
                if ran and time.monotonic() >= self.stop_starting_at:
                    break
                outcomes = self._called(group, db, handler, held)
                failed = next((outcome for outcome in outcomes if not isinstance(outcome, Succeeded)), None)
                if failed:
                    return Broken.by(group, failed)
                ran += zip(group, outcomes, strict=True)
            failpoint("ingest.after_effect")
            settling: Outcomes = [*ran, *((task, NO_TIME) for task in tasks[len(ran) :])]
            try:
                settled = self.unsettled.settle_in(db, settling)
                if len(settled) < len(tasks):
                    return Broken()
                db.commit_batch()
            except DBAPIError as error:
                return Broken.by(tasks, self._refusal(error, db))
        self.unsettled.done(settling, settled)
        failpoint("ingest.after_settle")
        return None

    def _called(self, tasks: Sequence[Task], db: HandlerSession, handler: Handler, held: HeldLease) -> list[Outcome]:
        started_at = time.monotonic()
        outcomes = call(handler, tasks, db, held, self.limit)
        each = (time.monotonic() - started_at) / len(tasks) + self.outside.get(tasks[0], 0.0)
        self.unsettled.seconds |= dict.fromkeys(tasks, each)
        batch_size.record_duration(handler, each)
        return outcomes

    def _refusal(self, error: DBAPIError, db: HandlerSession) -> Outcome:
        """Of settling, or of COMMIT, which checks the constraints that were deferred."""
        if db.is_lost:
            raise LedgerLost from error
        if is_serialization_failure(error) or was_dropped(error):
            raise Repeat from error
        if getattr(error.orig, "pgcode", None) == NO_SUCH_CURSOR:  # what it wrote may be there: never again
            return Dead(Failure.of(TransactionMisused(), ErrorCode.TRANSACTION_MISUSED))
        return outcome_of(error)

    def _blamed(self, error: Exception, code: ErrorCode) -> Outcomes:
        """Of what ran, one that ran alone is charged, and several are isolated; the others did not run (P5)."""
        running = self.unsettled.tasks.keys() & self.running
        failure = Failure.of(error, code)
        among_others = Isolated(f"its batch was broken off: {failure.message}"[:SENTENCE_LIMIT])
        ran = Retry(failure) if len(running) == 1 else among_others
        return [(task, ran if task in running else NO_TIME) for task in self.unsettled]
