"""What of a claim is not settled yet, and how it gets settled.

A task leaves here when what became of it is written under the lease, or when somebody else has it: then nothing is
written but that. The lease ends with the last of them, in the same commit. A connection that is lost while it settles
may have been a yes; the fence knows, so the same is asked again.

Tasks of one partition key leave in their order. One that does not make way holds up all after it (P9).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Final

from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolIsEmpty
from sqlalchemy.orm import Session

from models.engine import Bind
from models.errors import CeleriacError
from models.prepared_statements import was_dropped
from tasks.core.outcomes import Dead, Discarded, Outcome, Succeeded
from tasks.core.result_metrics import count, count_outcomes
from tasks.core.task import Task
from tasks.execution.claim import Claim
from tasks.execution.run_handler import is_serialization_failure
from tasks.execution.settle import Outcomes, Settlement
from tasks.execution.transaction import LedgerLost

logger = logging.getLogger(__name__)

REPEATS: Final = 5


class Unsettled:
    """The tasks of one lease that are still in our hands."""

    def __init__(self, engine: Bind, claim: Claim, settlement: Settlement) -> None:
        self.engine = engine
        self.settlement = settlement
        self.tasks = dict.fromkeys(claim.tasks)
        self.seconds: dict[Task, float] = {}  # in the handler, the last time it was called
        self._held_up: dict[str, int] = {}  # partition keys, and from which of their tasks on nothing may run

    def __iter__(self) -> Iterator[Task]:
        return iter(list(self.tasks))

    def settle(self, task: Task, outcome: Outcome) -> None:
        """In a transaction of its own, and nothing else in it."""
        settled = self._settled([(task, outcome)])
        if settled:
            self.done([(task, outcome)], settled)
        else:
            self.lost(task, outcome)

    def settle_in(self, db: Session, outcomes: Outcomes) -> Mapping[Task, Outcome]:
        """With the effects of their handlers; they are `done` when that is committed."""
        return self.settlement.settle(db, outcomes, is_last=self._are_last(outcomes), in_batch=True)

    def lost(self, task: Task, outcome: Outcome) -> None:
        """Somebody else has it: nothing is written but that."""
        code = "late_success" if isinstance(outcome, Succeeded) else "lease_lost"
        with Session(self.engine) as db:
            self.settlement.audit(db, [task.id], code, is_last=self._are_last([(task, outcome)]))
            db.commit()
        self.done([(task, outcome)], {})
        count("lease_lost", 1)

    def give_back(self, outcomes: Outcomes) -> None:
        """All that is left, in one commit. What another holder has, or was committed, stays as it is."""
        if not outcomes:
            return
        try:
            self.done(outcomes, self._settled(outcomes))
        except (SQLAlchemyError, CeleriacError):
            logger.exception("left to reclaim: %d tasks", len(outcomes))

    def done(self, outcomes: Outcomes, settled: Mapping[Task, Outcome]) -> None:
        """Committed. What is not among the settled is somebody else's."""
        for task, _ in outcomes:
            del self.tasks[task]
            if not self._makes_way(settled.get(task)):
                self._hold_up_behind(task)
        count_outcomes(settled, self.seconds)

    def is_held_up(self, task: Task) -> bool:
        """By one before it in its partition key."""
        return task.partition_key in self._held_up and (task.key_seq or 0) > self._held_up[task.partition_key]

    def is_behind(self, task: Task) -> bool:
        """Another of its partition key, which is here, too."""
        return task.partition_key is not None and any(
            other.partition_key == task.partition_key and (other.key_seq or 0) < (task.key_seq or 0)
            for other in self.tasks
        )

    def _settled(self, outcomes: Outcomes) -> Mapping[Task, Outcome]:
        """Until there is an answer. A lost one may have been a yes, and then the second finds nothing to settle."""
        answer_was_lost = False
        for _ in range(REPEATS):
            try:
                with Session(self.engine) as db:
                    settled = self.settlement.settle(db, outcomes, is_last=self._are_last(outcomes))
                    db.commit()
            except DBAPIError as error:
                if not (error.connection_invalidated or is_serialization_failure(error) or was_dropped(error)):
                    raise
                answer_was_lost |= error.connection_invalidated
            except PoolIsEmpty:  # other threads have all connections, and what ran is not to run again for that
                logger.warning("no connection is free to settle %d tasks", len(outcomes))
            else:
                if not answer_was_lost:
                    return settled
                for task, _ in outcomes:
                    if task not in settled:  # by us, or by somebody else meanwhile: nothing of its key passes it here
                        self._hold_up_behind(task)
                return dict(outcomes)
        raise LedgerLost

    def _hold_up_behind(self, task: Task) -> None:
        if task.partition_key is not None:
            place = task.key_seq or 0
            self._held_up[task.partition_key] = min(place, self._held_up.get(task.partition_key, place))

    def _are_last(self, outcomes: Outcomes) -> bool:
        return len(outcomes) == len(self.tasks)

    def _makes_way(self, outcome: Outcome | None) -> bool:
        """For the next of its partition key. None: somebody else decides."""
        return isinstance(outcome, Succeeded | Discarded) or (
            isinstance(outcome, Dead) and self.settlement.handler.skip_dead
        )
