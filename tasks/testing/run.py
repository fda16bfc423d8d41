"""Run tasks in the transaction of a test, with the claiming, running and settling code of production.

run         submit a task and run it            run_many    submit several tasks and run them as one batch
deliver     run a task of the ledger            run_due     run all due tasks that this transaction has submitted
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final

from sqlalchemy import Connection

import settings
from models.errors import Misuse
from models.sql import sql
from outbox.lease import Db
from tasks.core.due_times import OPEN, TIME
from tasks.core.holders import actor
from tasks.core.registry import Handler, find, handlers
from tasks.core.task import Task
from tasks.execution.claim import claim
from tasks.execution.run import run as run_claim
from tasks.execution.run_async import run_async
from tasks.submission.envelope import NewTask
from tasks.submission.submit import submit_many
from tasks.testing.run_result import Ran, read_ran
from tasks.testing.submitted import BORN_HERE, BY_A_TEST
from tasks.testing.transaction import inside

MOST_DELIVERIES: Final = 10_000
TYPES: Final = sql("SELECT DISTINCT type FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[]))")
# mark: note which tasks the test itself has submitted; `submitted` leaves them out.
MARK: Final = sql("""
    UPDATE ledger.ingest_task_transition SET message = :message
    WHERE task_id = ANY(CAST(:ids AS uuid[])) AND from_status IS NULL
""")
DUE: Final = sql(f"""
    SELECT task.id FROM ledger.ingest_task task JOIN ledger.ingest_task_transition birth ON birth.task_id = task.id
    WHERE birth.from_status IS NULL AND {BORN_HERE} AND task.{OPEN} AND {TIME} <= (SELECT ledger.ledger_now())
      AND task.id <> ALL(CAST(:refused AS uuid[]))
    ORDER BY task.key_seq, task.created_at, birth.id LIMIT 1
""")


def run(type: str, payload: Any = None, db: Db | None = None, **how: Any) -> Ran:
    """Submit a task and run it at once; `how` is what `submit` takes (key=, partition_key=, max_attempts=, …).

    Without `db`, it runs in a transaction of its own, which is rolled back.
    """
    return run_many(type, [payload], db, **how)[0]


def run_many(type: str, payloads: Sequence[Any], db: Db | None = None, **how: Any) -> list[Ran]:
    """Submit tasks of one type and run them as one batch; after a failure they run one by one."""
    if len(payloads) > (most := find(type).batch):
        raise Misuse(f"A batch of {type} has at most {most} tasks; {len(payloads)} were given.")
    with inside(db) as connection:
        submitted = submit_many(connection, [NewTask(type, payload, **how) for payload in payloads])
        ids = [each.task_id for each in submitted]
        connection.execute(MARK, {"ids": [each.task_id for each in submitted if each.created], "message": BY_A_TEST})
        return _delivered(connection, ids)


def deliver(db: Db, task_id: uuid.UUID) -> Ran:
    """Run a task of the ledger, as its wake-up would: a retry after `travel`, or one that your code has submitted."""
    with inside(db) as connection:
        return _delivered(connection, [task_id])[0]


def run_due(db: Db) -> list[Ran]:
    """Run the due tasks of this transaction, and those that they submit, until no task is due."""
    done: list[Ran] = []
    refused: list[uuid.UUID] = []  # not claimed: another task of their partition key is ahead of them
    with inside(db) as connection:
        while (id_ := connection.execute(DUE, {"refused": refused}).scalar()) is not None:
            each = _delivered(connection, [id_])[0]
            if each.was_run:
                done.append(each)
                refused.clear()
            else:
                refused.append(id_)
            if len(done) >= MOST_DELIVERIES:
                raise Misuse(f"Tasks submit each other without end: some are still due after {MOST_DELIVERIES:,} runs.")
    return done


def _delivered(connection: Connection, ids: Sequence[uuid.UUID]) -> list[Ran]:
    """Claim and run exactly these tasks; in production, a claim would add other due tasks to the batch."""
    types = connection.execute(TYPES, {"ids": list(ids)}).scalars().all()
    if len(types) != 1:
        raise Misuse(
            "All tasks must have the same type." if types else f"There is no task {ids[0]} in this transaction."
        )
    raised: dict[uuid.UUID, BaseException] = {}
    handler = _recording(find(types[0]), raised)
    current = settings.current()
    how: dict[str, Any] = {
        "handlers": {**handlers(), handler.type: replace(handler, batch=len(ids), limits=None)},
        "holder": actor(),
        "lease_seconds": current.ingest_lease_seconds,
        "batch_of": attrgetter("batch"),
    }
    claimed = claim(connection, ids, **how)
    if claimed.keyed:
        claimed = claim(connection, claimed.keyed, keyed=True, **how)
    if claimed.tasks:
        claimed.begin(connection, handler, lease_seconds=current.ingest_lease_seconds)
        if handler.is_async:
            run_async(claimed)
        else:
            run_claim(claimed)
    run_ids = {task.id for task in claimed.tasks}
    return [read_ran(connection, id_, was_run=id_ in run_ids, raised=raised.get(id_)) for id_ in ids]


def _recording(handler: Handler, raised: dict[uuid.UUID, BaseException]) -> Handler:
    """Return a handler that also records what it raises, for each task that it was given."""

    def function(given: Any, *more: Any) -> Any:
        tasks = given if handler.many else [given]
        for task in tasks:
            raised.pop(task.id, None)  # of an earlier run, together with others
        try:
            result = handler.function(given, *more)
        except BaseException as error:
            raised.update(dict.fromkeys((task.id for task in tasks), error))
            raise
        return result

    async def async_function(task: Task) -> Any:
        raised.pop(task.id, None)
        try:
            return await handler.function(task)
        except BaseException as error:
            raised[task.id] = error
            raise

    recording: Callable[..., Any] = async_function if handler.is_async else function
    return replace(handler, function=recording)
