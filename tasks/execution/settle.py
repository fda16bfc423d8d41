"""Settle tasks: write what became of them, under the token of their claim.

    Succeeded   RUNNING → SUCCEEDED, with the result
    Retry       RUNNING → RETRYING at now + backoff, with a wake-up for that time; attempt_count + 1
    Dead        RUNNING → DEAD, with its dead letter; attempt_count + 1
    Snoozed     RUNNING → RETRYING at a given time, with a wake-up for that time
    Discarded   RUNNING → DISCARDED
    Released    RUNNING → QUEUED, with a wake-up
    Isolated    RUNNING → RETRYING, due now, with a wake-up of its own

SUCCEEDED and the decision to commit the task's transactions in two-phase sinks are one commit (`sinks/two_phase.py`).
SUCCEEDED, DISCARDED, and DEAD with `skip_dead`, wake the next task of the partition key. The lease ends with its last
task, in the same commit.

The token decides. If a task's row no longer has it, another worker has taken the task over or an operator has discarded
it, and nothing but an audit is written.

While the ledger is unreachable, settling waits, even beyond the end of the lease: a lease that has expired is valid
until it is reclaimed. If the answer to a commit was lost, the same is written again, and changes nothing if the first
commit took effect.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

import settings
from models.driver_values import array, array_of_ids
from models.errors import CeleriacError
from models.ledger_outage import wait_for_ledger
from outbox.backoff import backoff_ms
from outbox.destinations import CELERY
from outbox.lease import Db, connection_of
from tally.append import APPEND, Counted, Sums, append_values
from tally.counts import count
from tally.subjects import Subject
from tasks.core import wakeups
from tasks.core.holders import actor
from tasks.core.outcomes import Dead, Isolated, Outcome, Released, Retry, Snoozed, Succeeded
from tasks.core.partition_keys import skipping
from tasks.core.registry import Handler, find_or_default, handlers
from tasks.core.task import Task
from tasks.execution.claim import Claim, task_from_row
from tasks.execution.claim_statements import RUNNING
from tasks.execution.decision import dead_after_last_attempt
from tasks.execution.limits import has_places, wake_waiting
from tasks.execution.settle_statements import AUDIT, TRANSITIONS, settling
from tasks.execution.task_events import report_settled

logger = logging.getLogger(__name__)

Outcomes = Mapping[Task, Outcome]
NOT_CALLED: Final[Mapping[Task, float]] = {}
STOP_SECONDS: Final = 3.0  # how long a worker that stops waits for the ledger; Celery kills it after five


def settle(
    claim: Claim,
    outcomes: Outcomes,
    *,
    seconds: float = math.inf,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Write these outcomes in a transaction of their own. Wait for an unreachable ledger, for `seconds` at most.

    `pause` is called while it waits, and may raise to end the waiting.
    """
    if not outcomes:
        return
    claim.decided.update(outcomes)
    answer_was_lost = False

    def write() -> Outcomes:
        nonlocal answer_was_lost
        try:
            with Session(claim.bind) as db:
                settled = settle_in(db, claim, outcomes)
                if not answer_was_lost:  # otherwise our own commit may have settled what is missing now
                    refused = _refused(outcomes, settled)
                    for code in set(refused.values()):
                        ids = [task.id for task, its_code in refused.items() if its_code == code]
                        audit(db, ids, code, token=claim.token)
                db.commit()
        except DBAPIError as error:
            answer_was_lost |= error.connection_invalidated
            raise
        return settled

    settled = wait_for_ledger(write, seconds=seconds, pause=pause)
    if not answer_was_lost:
        _count_lost(next(iter(outcomes)), len(_refused(outcomes, settled)))  # all have the same type and queue
        claim.mark_settled(outcomes, settled)
        return
    missing = [task for task in outcomes if task not in settled]
    claim.mark_settled(outcomes, {task: dead_after_last_attempt(task, outcome) for task, outcome in outcomes.items()})
    for task in missing:  # we cannot tell our own lost answer from a takeover, so the rest of its key is released
        claim.block_key_behind(task)


def settle_in(db: Db, claim: Claim, outcomes: Outcomes, *, in_batch: bool = False) -> Outcomes:
    """Write these outcomes in the transaction of `db`. The caller commits and then calls `claim.mark_settled`."""
    is_last = len(outcomes) == len(claim.unsettled)
    how: dict[str, Any] = {"handler": claim.handler, "is_last": is_last, "in_batch": in_batch, "spent": claim.seconds}
    settled = write_outcomes(db, outcomes, token=claim.token, **how)
    for task in claim.prepared.keys() & outcomes.keys():
        claim.prepared[task].decide(db, has_succeeded=isinstance(settled.get(task), Succeeded))
    if settled and has_places(claim.handler) and claim.is_visible:
        wake_waiting(db, [task.id for task in settled])
    return settled


def give_up(claim: Claim, task: Task) -> None:
    """Record that the task ran here although another worker has taken it over. Its effects were rolled back."""

    def write() -> None:
        with Session(claim.bind) as db:
            audit(db, [task.id], "late_success", token=claim.token, is_last=len(claim.unsettled) == 1)
            db.commit()

    wait_for_ledger(write)
    claim.mark_settled({task: Released("")}, {})
    _count_lost(task, 1)


def release_unstarted(engine: Engine, token: uuid.UUID, outcome: Released | Snoozed) -> None:
    """Release the tasks of a token before an error goes on. If the ledger does not answer soon, reclaim does it."""
    try:
        wait_for_ledger(lambda: release_token(engine, token, outcome), seconds=STOP_SECONDS)
    except (SQLAlchemyError, CeleriacError) as error:
        logger.warning(
            "Left to reclaim, if it was claimed: %s",
            str(error).partition("\n")[0],
            extra={"event": "tasks_left_to_reclaim"},
        )


def release_token(engine: Engine, token: uuid.UUID, outcome: Released | Snoozed) -> None:
    """Release the tasks that were claimed under this token, if any were. For a caller that has no `Claim` object."""
    with Session(engine) as db:
        tasks = [task_from_row(row) for _, *row in db.execute(RUNNING, {"tokens": [token]})]
        if not tasks:
            return
        handler = find_or_default(tasks[0].type)
        released = write_outcomes(db, dict.fromkeys(tasks, outcome), token=token, handler=handler, is_last=True)
        if has_places(handler):
            wake_waiting(db, [task.id for task in tasks])
        db.commit()
    report_settled(released, released)


def audit(db: Db, ids: Sequence[uuid.UUID], code: str, *, token: uuid.UUID, is_last: bool = False) -> None:
    """Record that the holder of this token was not allowed to settle these tasks. `is_last` ends the lease."""
    values = {"id": array_of_ids(ids), "code": code, "worker_id": actor(), "token": token, "is_last": is_last}
    connection_of(db).execute(AUDIT, values)


def _count_lost(task: Task, how_many: int) -> None:
    """Count tasks like this one whose lease was lost, after the commit of their audit."""
    count(Subject.LEASE, "lost", how_many)
    count(Subject.TASK, "lease_lost", how_many, type=task.type, queue=task.queue)


def _refused(outcomes: Outcomes, settled: Outcomes) -> dict[Task, str]:
    """Return the audit code of each task that was not settled. A task that was only to be released needs no audit."""
    return {
        task: "late_success" if isinstance(outcome, Succeeded) else "lease_lost"
        for task, outcome in outcomes.items()
        if task not in settled and not isinstance(outcome, Released | Isolated)
    }


def write_outcomes(
    db: Db,
    outcomes: Outcomes,
    *,
    token: uuid.UUID,
    handler: Handler,
    is_last: bool = False,
    in_batch: bool = False,
    spent: Mapping[Task, float] = NOT_CALLED,
) -> dict[Task, Outcome]:
    """Write outcomes under a token, and return those that were written.

    There is one statement for all outcomes of a kind. `is_last` ends the lease. `in_batch`: in the transaction of the
    handlers, whose guard against a COMMIT the statement removes. `spent` has the seconds in the handler of those tasks
    whose handler was called.
    """
    groups: dict[Any, dict[Task, Any]] = defaultdict(dict)  # by the class of the outcome
    for task, outcome in outcomes.items():
        final = dead_after_last_attempt(task, outcome)
        groups[type(final)][task] = final
    settled: dict[Task, Outcome] = {}
    for kind, group in groups.items():
        parameters = {
            **_values(kind, group, handler),
            "id": array_of_ids(task.id for task in group),
            "token": token,
            "actor": actor(),
            "is_last": is_last and not settled,  # the first statement locks the lease before all tasks
            **_sums(group, spent).values(),
            **wakeups.wakeup_values(db, {task.queue for task in group}),
        }
        statement = settling(kind, frees_keys="skipping" in parameters, in_batch=in_batch and kind is Succeeded)
        ids, ours = statement.execute(connection_of(db), parameters).one()
        wakeups.publish_after_commit(db, ours)
        if ids is None:  # all of them
            settled.update(group)
            continue
        written = set(ids)
        some = {task: outcome for task, outcome in group.items() if task.id in written}
        _append_tally(db, TRANSITIONS[kind].result, some, spent)
        settled.update(some)
    return settled


def _sums(tasks: Collection[Task], spent: Mapping[Task, float]) -> Sums:
    """Return what the tally says about tasks: seconds in the handler, and seconds of waiting until the claim."""
    runs = [spent[task] for task in tasks if task in spent]
    return Sums.of(len(tasks), runs, [task.waited_seconds for task in tasks if task.waited_seconds is not None])


def _append_tally(db: Db, result: str, tasks: Collection[Task], spent: Mapping[Task, float]) -> None:
    """Count the tasks that were settled, if the statement that settled them did not because others were not."""
    for task in list(tasks)[:1]:
        counted = Counted(Subject.TASK, result, task.queue, task.type)
        connection_of(db).execute(APPEND, append_values({counted: _sums(tasks, spent)}))


def _values(kind: Any, group: Mapping[Task, Any], handler: Handler) -> dict[str, Any]:
    """Return the parameters of the statement that settles tasks with one kind of outcome."""
    transition = TRANSITIONS[kind]
    values: dict[str, Any] = {
        name: array(_COLUMNS[name](handler, task, outcome) for task, outcome in group.items())
        for name in transition.columns
    }
    frees_keys = transition.is_final and (kind is not Dead or handler.skip_dead)
    if frees_keys and any(task.partition_key is not None for task in group):
        values["skipping"] = skipping(handlers())
    if kind is Dead:
        queue = settings.current().ingest_dlq_queue
        values["dead_letters"] = f"{CELERY}{queue}" if queue else ""
    return values


def _wait_ms(handler: Handler, task: Task, outcome: Retry | Snoozed) -> float:
    if isinstance(outcome, Snoozed):
        return outcome.seconds * 1000
    return max(_backoff_ms(handler, task.attempt_count + 1), outcome.least_seconds * 1000)


def _backoff_ms(handler: Handler, attempt: int) -> float:
    if handler.backoff:
        return handler.backoff[min(attempt, len(handler.backoff)) - 1] * 1000
    current = settings.current()
    return backoff_ms(
        attempt,
        base_ms=current.ingest_retry_base_backoff_ms,
        cap_ms=current.ingest_retry_max_backoff_ms,
        jitter=current.ingest_retry_jitter,
    )


_COLUMNS: Final[dict[str, Callable[[Handler, Task, Any], Any]]] = {
    "result": lambda _, __, succeeded: succeeded.written,
    "why": lambda _, __, outcome: outcome.why,
    "wait_ms": _wait_ms,
    "last_error": lambda _, __, failed: failed.failure.trace,
    "error_message": lambda _, __, failed: failed.failure.message,
    "error_code": lambda _, __, failed: failed.failure.code,
}
