"""Running a claimed batch: together if all goes well, one by one if not, so that a bad task costs nobody but itself.

    together    one transaction: every handler's effects, every SUCCEEDED, every transition (P3)
    one by one  after anything else than success of all: ROLLBACK, the culprit is settled with what became of it, and
                the others run in a transaction each

Settling must return exactly the tasks that ran. One fewer means that its lease was lost: everything is rolled back, and
what is still ours runs one by one. After half a lease no further task is started; what is done is settled, the rest is
given back (P6). When the connection is lost, nobody knows whether the COMMIT went through: the fence does, and what is
still ours goes back, to be run alone (P5).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from failpoint import failpoint
from models.errors import CeleriacError, Unreachable
from settings import Settings
from tasks.call import Repeat, call, is_serialization_failure
from tasks.counting import count, count_outcomes
from tasks.guard import Claim
from tasks.handler_session import HandlerSession, TransactionMisused
from tasks.heartbeat import Held, heartbeat
from tasks.outcomes import Dead, ErrorCode, Failure, Outcome, Released, Retry, Succeeded, outcome_of
from tasks.registry import Handler
from tasks.settle import Outcomes, Settlement
from tasks.task import Task

logger = logging.getLogger(__name__)

REPEATS: Final = 5
NO_TIME: Final = Released("there was no time to start it")
STILL_THE_SAME: Final = text("SELECT coalesce(current_setting('celeriac.batch', true), '') = :batch")


@dataclass(frozen=True, slots=True)
class Broken:
    """A transaction that was rolled back: what is known of whose fault it was."""

    outcomes: Outcomes = field(default_factory=list)
    misused: bool = False


class Batch:
    """One claim in the hands of its handler."""

    def __init__(self, engine: Engine, claim: Claim, handler: Handler, settings: Settings) -> None:
        self.engine = engine
        self.claim = claim
        self.handler = handler
        self.settlement = Settlement(claim.token, handler, settings)
        self.stop_starting_at = claim.deadline - settings.ingest_lease_seconds / 2
        self.unsettled = {task.id: task for task in claim.tasks}
        self.running: Sequence[Task] = ()

    def run(self) -> None:
        with heartbeat().holding(self.claim.token, self.claim.deadline) as held:
            try:
                self._together(held)
                for task in list(self.unsettled.values()):
                    self._alone(task, held)
            except (OperationalError, Unreachable) as error:
                self._connection_lost(error)
            except BaseException as stopped:
                self._settle_rest(outcome_of(stopped))
                raise

    def _together(self, held: Held) -> None:
        """Afterwards all are settled, or the culprit is."""
        if len(self.unsettled) == 1:
            return
        broken = self._attempt(self.claim.tasks, held)
        if broken and len(broken.outcomes) == 1:
            self._settle(broken.outcomes)

    def _alone(self, task: Task, held: Held) -> None:
        if len(self.claim.tasks) > 1 and time.monotonic() >= self.stop_starting_at:
            self._settle([(task, NO_TIME)])
            return
        broken = self._attempt([task], held)
        match broken:
            case Broken(outcomes=[_, *_] as outcomes):
                self._settle(outcomes)
            case Broken(misused=True):
                failure = Failure.of(TransactionMisused(), ErrorCode.TRANSACTION_MISUSED)
                self._settle([(task, Dead(failure))])  # its effects are there: never again
            case Broken():
                self._lost([task], "late_success")

    def _attempt(self, tasks: Sequence[Task], held: Held) -> Broken | None:
        """One transaction, repeated if the database asks for it. None: committed."""
        self.running = tasks
        for _ in range(REPEATS):
            try:
                return self._transaction(tasks, held)
            except Repeat:
                continue
        return Broken([(task, Released("the database asked too often for a repetition")) for task in tasks])

    def _transaction(self, tasks: Sequence[Task], held: Held) -> Broken | None:
        ran: list[tuple[Task, Outcome]] = []
        seconds: list[float] = []
        with HandlerSession(self.engine) as db:
            db.begin_batch(self.claim.token)
            for group in [tasks] if self.handler.many else [[task] for task in tasks]:
                if ran and time.monotonic() >= self.stop_starting_at:
                    break
                started_at = time.monotonic()
                outcomes = call(self.handler, group, db, held)
                if not all(isinstance(outcome, Succeeded) for outcome in outcomes):
                    return Broken(list(zip(group, outcomes, strict=True)))
                ran += zip(group, outcomes, strict=True)
                seconds += [(time.monotonic() - started_at) / len(group)] * len(group)
            failpoint("ingest.after_effect")
            settling: Outcomes = [*ran, *((task, NO_TIME) for task in tasks[len(ran) :])]
            try:
                settled = self._settled_in(db, settling)
                if len(settled) < len(tasks):
                    return Broken(misused=not db.execute(STILL_THE_SAME, {"batch": str(self.claim.token)}).scalar_one())
                db.commit_batch()
            except DBAPIError as error:
                if is_serialization_failure(error):
                    raise Repeat from error
                if error.connection_invalidated:
                    raise
                return Broken([(task, outcome_of(error)) for task in tasks])  # a constraint that COMMIT checked
        self._forget(settling)
        count_outcomes([outcome for _, outcome in settling], seconds)
        failpoint("ingest.after_settle")
        return None

    def _settle(self, outcomes: Outcomes) -> None:
        """In a transaction of their own, and nothing else in it."""
        with Session(self.engine) as db:
            settled = self._settled_in(db, outcomes)
            db.commit()
        lost = [task for task, _ in outcomes if task.id not in settled]
        if lost:
            self._lost(lost, "lease_lost")
        self._forget(outcomes)
        count_outcomes([outcome for task, outcome in outcomes if task.id in settled], ())

    def _settled_in(self, db: Session, outcomes: Outcomes) -> set[uuid.UUID]:
        is_last = len(outcomes) == len(self.unsettled)
        batch = str(self.claim.token) if isinstance(db, HandlerSession) else None
        return self.settlement.settle(db, outcomes, is_last=is_last, batch=batch)

    def _settle_rest(self, outcome: Outcome) -> None:
        """What has not been settled, when this process stops or meets a fault of ours."""
        rest = list(self.unsettled.values())
        if rest:
            try:
                self._settle([(task, outcome) for task in rest])
            except (DBAPIError, CeleriacError):
                logger.exception("left to reclaim: %d tasks", len(rest))

    def _lost(self, tasks: Sequence[Task], code: str) -> None:
        with Session(self.engine) as db:
            self.settlement.audit(db, [task.id for task in tasks], code)
            db.commit()
        self._forget([(task, NO_TIME) for task in tasks])
        count("lease_lost", len(tasks))

    def _connection_lost(self, error: OperationalError | Unreachable) -> None:
        """The fence tells what was committed. Of what was not, one that ran alone is charged, others are isolated."""
        logger.warning("the ledger was lost: %s", str(error).partition("\n")[0])
        running = [task for task in self.running if task.id in self.unsettled]
        try:
            with Session(self.engine) as db:
                if len(running) == 1:
                    self.settlement.settle(db, [(running[0], Retry(Failure.of(error)))])
                else:
                    self.settlement.isolate(db, running, "the connection to the ledger was lost")
                db.commit()
            self._forget([(task, NO_TIME) for task in running])
            self._settle_rest(Released("the connection to the ledger was lost"))
        except (DBAPIError, CeleriacError):
            logger.exception("left to reclaim: %d tasks", len(self.unsettled))

    def _forget(self, outcomes: Outcomes) -> None:
        for task, _ in outcomes:
            self.unsettled.pop(task.id, None)
