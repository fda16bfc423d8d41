"""Run a claim: together in one transaction if all goes well, in several if not.

    together    one transaction: the effects of every handler, and SUCCEEDED for every task
    in parts    if a task does not succeed: the transaction is rolled back, and that task is settled. The tasks before
                it ran well and run again together; those behind it go on together
    one by one  if it is unknown which task broke the transaction: each runs in a transaction of its own
    released    if the connection was lost: all tasks of that transaction; the second time in a row, each runs alone
    outside     a handler that is not transactional: one by one (async handlers: `run_async.py`), each settled right
                after it ran; what it leaves to `Finish` is written in the transaction that settles it, and so is the
                decision about transactions in two-phase sinks, which are finished afterwards (`sinks/task_sinks.py`)

So a bad task costs those before it in its batch a second run and no attempt, and its own writes are rolled back.
Settling must return exactly the tasks of its transaction. If one is missing, another worker has taken it over or an
operator has discarded it: everything is rolled back, and the tasks run one by one.

A lost connection in the middle of a COMMIT does not tell whether the COMMIT took effect. The tasks are settled as
released or isolated, under the same token. If the COMMIT did take effect, the rows no longer have the token, and this
second settling finds nothing to change.

Tasks of one partition key run in their order; when one does not succeed, those behind it are released. After a second,
and in any case after half a lease, no further task is started, and the rest is released (docs/protocol.md, Heartbeat).
When `run` returns or raises, every task of the claim is settled or released. Only if the ledger stays unreachable for
three seconds at a stop or an error are they left to reclaim.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from failpoint import failpoint
from models.errors import CeleriacError
from models.ledger_outage import outage
from sinks.task_sinks import TaskSinks
from sinks.transactions import finish
from tasks.core.lease import HeldLease, WatchedTask
from tasks.core.outcomes import DONE, SENTENCE_LIMIT, Failure, Finish, Isolated, Outcome, Released, Snoozed, Succeeded
from tasks.core.registry import Handler
from tasks.core.steps import Steps
from tasks.core.task import Task
from tasks.execution.call_handler import call_handler
from tasks.execution.claim import ALONE_NEXT_TIME, NOT_STARTED, Claim
from tasks.execution.decision import CONNECTION_LOST, CONNECTION_LOST_BY_BATCH, Repeat, Situation, decide, decide_result
from tasks.execution.heartbeat import heartbeat
from tasks.execution.settle import STOP_SECONDS, give_up, settle, settle_in
from tasks.execution.stopping import what_stops
from tasks.execution.transaction import TransactionState, handler_session

logger = logging.getLogger(__name__)

NOT_BEGUN: Final = Snoozed(1.0, "its batch could not begin")
NOT_ITS_TURN: Final = Released("a task before it in its partition key did not succeed")


def run(claim: Claim) -> None:
    """Run every task of the claim."""
    with claim_is_ended(claim), claim.soft_limit:
        parts: list[Sequence[Task]] = [claim.tasks] if claim.handler.transactional else []
        while parts:
            part = [task for task in parts.pop(0) if task in claim.unsettled and not claim.is_blocked(task)]
            if not part:
                continue
            culprit = run_in_transaction(claim, part, claim.handler)
            if len(part) == len(claim.tasks):
                claim.restart_clock()  # the whole batch was tried; its time does not count for its parts
            if culprit is not None:
                place = part.index(culprit)
                parts[:0] = [part[:place], part[place:]]  # without the culprit if it was settled (see above)
            elif not claim.unsettled.keys().isdisjoint(part):
                break  # it is unknown which task broke the transaction
            if claim.is_out_of_time:
                break
        for task in list(claim.unsettled):
            if len(claim.tasks) > 1 and claim.is_out_of_time:
                settle(claim, dict.fromkeys(claim.unsettled, claim.not_started))
                break
            if claim.is_blocked(task):
                settle(claim, {task: NOT_ITS_TURN})
            elif claim.handler.transactional:
                run_in_transaction(claim, [task], claim.handler)
            else:
                run_outside(claim, task)


def run_in_transaction(claim: Claim, tasks: Sequence[Task], handler: Handler) -> Task | None:
    """Run tasks in one transaction, again if the database asks for a repetition, and settle what can be settled.

    After a commit or a lost connection, every task is settled. After any other rollback it is the task that caused it,
    if that is known and no task of its partition key is before it. Return the task that caused it.
    """
    repetitions = 0
    commit_is_unknown = False
    while isinstance(broken := _attempt(claim, tasks, handler, repetitions), RolledBack):
        if not isinstance(broken.outcome, Repeat):
            break
        repetitions += 1
        commit_is_unknown |= broken.connection_was_lost
        claim.restore(tasks)
        claim.restart_clock()
    if broken is None:
        return None
    assert not isinstance(broken.outcome, Repeat)
    is_alone = len(tasks) == 1
    if broken.outcome is None and is_alone:
        if commit_is_unknown:  # most likely it took effect: a row that is SUCCEEDED has no token
            claim.mark_settled({tasks[0]: DONE}, {})
        else:
            give_up(claim, tasks[0])
    elif broken.outcome and broken.connection_was_lost:
        settle(claim, dict.fromkeys(tasks, broken.outcome))
    elif broken.outcome and broken.culprit and (is_alone or not claim.has_predecessor(broken.culprit)):
        # But not a culprit behind another task of its key: what it saw was rolled back, so it runs again.
        settle(claim, {broken.culprit: broken.outcome})
    elif claim.half_a_lease_is_over:
        claim.not_started = ALONE_NEXT_TIME  # otherwise the same tasks would come together again, for ever
    ran = tasks[: tasks.index(broken.culprit) + 1] if broken.culprit else tasks
    if again := [task for task in ran if task in claim.unsettled]:
        claim.restore(again)
    return broken.culprit


def run_outside(claim: Claim, task: Task) -> None:
    """Run a task outside a transaction. No connection is held while its handler runs."""
    claim.running = [task]
    steps = Steps(claim.bind, task.id, claim.lease)
    sinks = TaskSinks(claim.bind, task, claim.lease, steps)
    given = replace(task, steps=steps, sinks=sinks)  # a copy: another key in `claim.seconds`
    claim.lease.watched = WatchedTask(task.id, claim.soft_limit.interrupter_of_next_call())
    result, error = None, None
    try:
        (result,) = call_handler(claim, claim.handler, [given])
    except BaseException as raised:
        error = raised
    finally:
        claim.lease.watched = None
        claim.seconds[task] = claim.seconds.pop(given, 0.0)
    outcome = decide_outside(claim, sinks, result, error)
    error = None  # its traceback refers to this frame
    if isinstance(outcome, Finish):
        finish_outside(claim, task, sinks, outcome)
    else:
        settle(claim, {task: outcome})
        claim.committed_gids += sinks.close()


def decide_outside(claim: Claim, sinks: TaskSinks, result: Any, error: BaseException | None) -> Outcome | Finish:
    """Return what becomes of a task whose handler returned or raised this. Its sinks prepare to commit, or abort.

    A `Finish` is for `finish_outside`. If the worker stops, the exception that stops it is raised.
    """
    now = Situation(claim.handler)
    if error is None:
        try:
            outcome = result if isinstance(result, Finish) else decide_result(result, now)
            if isinstance(outcome, Succeeded | Finish):
                sinks.before_settling()
                if sinks.gids:
                    claim.prepared[sinks.task] = sinks
                return sinks.finishing(result) if sinks.deferred else outcome
            sinks.abort()
            return outcome
        except BaseException as raised:
            error = raised
    sinks.abort()
    if stopped := what_stops(error):
        raise stopped from None
    decided = decide(error, now)
    error = None  # its traceback may refer to this frame
    assert not isinstance(decided, Repeat)  # only a transaction is repeated
    return decided


def finish_outside(claim: Claim, task: Task, sinks: TaskSinks, outcome: Finish) -> None:
    """Write what the handler has left to `Finish` in the transaction that settles the task."""
    claim.seconds_outside[task] = claim.seconds[task]
    run_in_transaction(claim, [task], _finishing(claim.handler, outcome))
    claim.committed_gids += sinks.close()


class RolledBack(NamedTuple):
    """A transaction that was rolled back. Without an outcome: another worker has taken over one of its tasks."""

    outcome: Outcome | Repeat | None = None
    culprit: Task | None = None  # None: it is unknown which of several tasks caused it
    connection_was_lost: bool = False  # if that was in COMMIT, it may have taken effect


def _attempt(claim: Claim, tasks: Sequence[Task], handler: Handler, repetitions: int) -> RolledBack | None:
    """Run tasks in one transaction and commit; return None, or why it was rolled back."""
    is_alone = len(tasks) == 1
    now = Situation(handler, is_alone)
    ran: dict[Task, Outcome] = {}
    claim.running = ()  # no task is charged if the transaction cannot be opened
    opening_at = time.monotonic()
    with handler_session(claim.bind) as db:
        claim.running = tasks
        claim.extend_clock(time.monotonic() - opening_at)  # the ledger may have been unreachable until now

        def roll_back(error: BaseException, group: Sequence[Task]) -> RolledBack:
            if stopped := what_stops(error):
                raise stopped from None
            state, losses = db.state, 0
            if state is TransactionState.LOST:
                losses = claim.count_losses(tasks, CONNECTION_LOST if is_alone else CONNECTION_LOST_BY_BATCH)
            is_finish = not claim.handler.transactional
            outcome = decide(error, Situation(handler, is_alone, state, repetitions, is_finish, losses))
            return RolledBack(outcome, group[0] if len(group) == 1 else None, state is TransactionState.LOST)

        for group in [tasks] if handler.many else [[task] for task in tasks]:
            if ran and claim.is_out_of_time:
                break
            try:
                results = call_handler(claim, handler, group, db)
            except BaseException as error:
                return roll_back(error, group)
            outcomes = [decide_result(result, now) for result in results]
            if failed := next((outcome for outcome in outcomes if not isinstance(outcome, Succeeded)), None):
                return RolledBack(failed, group[0] if len(group) == 1 else None)
            ran.update(zip(group, outcomes, strict=True))
        failpoint("ingest.after_effect")
        settling = {**ran, **dict.fromkeys(tasks[len(ran) :], NOT_STARTED)}
        try:
            settled = settle_in(db, claim, settling, in_batch=True)
            if len(settled) < len(tasks):
                return RolledBack()
            db.commit_batch()
        except DBAPIError as error:  # COMMIT, too, may fail: it checks deferred constraints
            return roll_back(error, tasks)
    claim.mark_settled(settling, settled)
    failpoint("ingest.after_settle")
    return None


def _finishing(handler: Handler, finish: Finish) -> Handler:
    """Return the last part of a handler that ran outside a transaction, as a transactional handler."""

    def write(_task: Task, db: Session) -> Any:
        left = finish.write(db)
        if isinstance(left, Coroutine | Generator):
            left.close()
            raise TypeError("The function given to Finish is async or a generator; calling it does nothing.")
        return finish.result

    return replace(handler, transactional=True, function=write)


@contextmanager
def claim_is_ended(claim: Claim) -> Iterator[None]:
    """Renew the lease while the block runs. At its end, every task is settled or released."""
    with _commits_are_recorded(claim), _rest_is_released(claim), lease_is_held(claim, claim.lease):
        yield


def lease_is_held(claim: Claim, lease: HeldLease) -> AbstractContextManager[object]:
    """Renew a lease of this claim while the block runs."""
    return heartbeat().holding(lease) if claim.is_visible else nullcontext()


@contextmanager
def _commits_are_recorded(claim: Claim) -> Iterator[None]:
    """Record, at the end and once for the claim, what two-phase sinks have committed. If it fails, recovery does it."""
    try:
        yield
    finally:
        if claim.committed_gids:
            with suppress(SQLAlchemyError, CeleriacError):
                finish(claim.bind, claim.committed_gids, seconds=STOP_SECONDS)


@contextmanager
def _rest_is_released(claim: Claim) -> Iterator[None]:
    """Settle what is left when the worker stops, or when our own code fails, and let the error pass.

    An outcome that was decided but not written is still written. A worker that stops releases the other tasks. If our
    code failed while one task was running, that task is charged with the error; if several were running, each runs
    alone next time. Tasks that were not running are released; if none was running yet, they wait for a second.
    """
    try:
        yield
    except BaseException as error:
        rest: Outcome = Released(f"the worker stopped: {type(error).__name__}")
        running = rest
        if isinstance(error, Exception) and not what_stops(error):
            rest, charged = NOT_STARTED if claim.running else NOT_BEGUN, decide(error, Situation(claim.handler))
            among_others = Isolated(f"its batch was broken off: {Failure.of(error).message}"[:SENTENCE_LIMIT])
            is_alone = len(claim.unsettled.keys() & claim.running) == 1
            running = charged if is_alone and not isinstance(charged, Repeat) else among_others
        left = {task: running if task in claim.running else rest for task in claim.unsettled}
        try:
            # An async handler may have many claims; together they wait once.
            settle(claim, {**left, **claim.decided}, seconds=max(0.0, STOP_SECONDS - outage.seconds))
        except (SQLAlchemyError, CeleriacError):
            logger.exception(
                "Left to reclaim: %d tasks.",
                len(left),
                extra={"event": "tasks_left_to_reclaim", "taskIds": [str(task.id) for task in left]},
            )
        raise
