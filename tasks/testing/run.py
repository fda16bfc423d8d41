"""Running tasks in the transaction of a test: the guard, the batch and the settling of production.

run         submit one and deliver it           run_many    several, as one batch
deliver     one that is there (a retry)         run_due     all that this transaction submitted and that is due
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final

from sqlalchemy import Connection

import settings
from models.errors import Misuse
from models.sql import sql
from outbox.lease import Db
from tasks.core.due import OPEN, TIME
from tasks.core.holders import actor
from tasks.core.lease import Held
from tasks.core.registry import Handler, find, handlers
from tasks.execution.batch import Batch
from tasks.execution.claim import claim
from tasks.execution.claim_partitioned import claim_keyed
from tasks.submission.envelope import NewTask
from tasks.submission.submit import submit_many
from tasks.testing.ran import Ran, ran
from tasks.testing.submitted import BORN_HERE, BY_A_TEST
from tasks.testing.transaction import inside

MOST_DELIVERIES: Final = 10_000
TYPES: Final = sql("SELECT DISTINCT type FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[]))")
# mark: so that `submitted` tells what the test itself submitted from what the code under test did.
MARK: Final = sql("""
    UPDATE ledger.ingest_task_transition SET message = :message
    WHERE task_id = ANY(CAST(:ids AS uuid[])) AND from_status IS NULL
""")
DUE: Final = sql(f"""
    SELECT task.id FROM ledger.ingest_task task JOIN ledger.ingest_task_transition birth ON birth.task_id = task.id
    WHERE birth.from_status IS NULL AND {BORN_HERE} AND task.{OPEN} AND {TIME} <= (SELECT ledger.ledger_now())
      AND task.id <> ALL(CAST(:refused AS uuid[]))
    ORDER BY task.key_seq, task.created_at, birth.id LIMIT 1
""")  # noqa: S608 - literals of ours


def run(type: str, payload: Any = None, db: Db | None = None, **how: Any) -> Ran:
    """Submit a task and run it at once; `how` is what `submit` takes (key=, partition_key=, max_attempts=, …).

    Without `db` it happens in a transaction of its own, of which nothing stays.
    """
    return run_many(type, [payload], db, **how)[0]


def run_many(type: str, payloads: Sequence[Any], db: Db | None = None, **how: Any) -> list[Ran]:
    """Tasks of one type as one batch, together if all goes well, and one by one if not."""
    if len(payloads) > (most := find(type).batch):
        raise Misuse(f"A batch of {type} has at most {most} tasks, and here are {len(payloads)}.")
    with inside(db) as connection:
        submitted = submit_many(connection, [NewTask(type, payload, **how) for payload in payloads])
        ids = [each.task_id for each in submitted]
        connection.execute(MARK, {"ids": [each.task_id for each in submitted if each.created], "message": BY_A_TEST})
        return _delivered(connection, ids)


def deliver(db: Db, task_id: uuid.UUID) -> Ran:
    """Run a task that is in the ledger, as when its wake-up comes: a retry after `travel`, one that was submitted."""
    with inside(db) as connection:
        return _delivered(connection, [task_id])[0]


def run_due(db: Db) -> list[Ran]:
    """Run what this transaction has submitted, and what that submits, until nothing of it is due any more."""
    done: list[Ran] = []
    refused: list[uuid.UUID] = []  # by the guard: another task of their partition key holds them up
    with inside(db) as connection:
        while (id_ := connection.execute(DUE, {"refused": refused}).scalar()) is not None:
            each = _delivered(connection, [id_])[0]
            if each.was_run:
                done.append(each)
                refused.clear()
            else:
                refused.append(id_)
            if len(done) >= MOST_DELIVERIES:
                raise Misuse(
                    f"After {MOST_DELIVERIES:,} runs something is still due: tasks submit each other for ever."
                )
    return done


def _delivered(connection: Connection, ids: Sequence[uuid.UUID]) -> list[Ran]:
    """One batch of these and no others: a guard that topped it up would run what the test did not ask for."""
    types = connection.execute(TYPES, {"ids": list(ids)}).scalars().all()
    if len(types) != 1:
        raise Misuse(f"There is no task {ids[0]} in this transaction." if not types else "They are of several types.")
    raised: dict[uuid.UUID, BaseException] = {}
    handler = _watched(find(types[0]), raised)
    current = settings.current()
    how: dict[str, Any] = {
        "handlers": {**handlers(), handler.type: replace(handler, batch=len(ids))},
        "holder": actor(),
        "lease_seconds": current.ingest_lease_seconds,
        "commits": False,
        "batch_of": attrgetter("batch"),
    }
    claimed = claim(connection, ids, **how)
    if claimed.keyed:
        claimed = claim_keyed(connection, claimed.keyed, **how)
    if claimed.tasks:
        _Batch(connection, claimed, handler, current).run()
    admitted = {task.id for task in claimed.tasks}
    return [ran(connection, id_, was_run=id_ in admitted, raised=raised.get(id_)) for id_ in ids]


def _watched(handler: Handler, raised: dict[uuid.UUID, BaseException]) -> Handler:
    """The same, and what comes out of it is kept for the test; of a handler of many, for each of them."""

    def function(given: Any, *more: Any) -> Any:
        tasks = given if handler.many else [given]
        for task in tasks:
            raised.pop(task.id, None)  # together with others, and now alone
        try:
            result = handler.function(given, *more)
        except BaseException as error:
            raised.update(dict.fromkeys((task.id for task in tasks), error))
            raise
        return result

    watched: Callable[..., Any] = function
    return replace(handler, function=watched)


class _Batch(Batch):
    """Nobody can take the lease of a claim that nobody sees: there is nothing to renew, and nobody to watch for.

    Nor is there anybody to share a slow batch with.
    """

    def _stop_starting_at(self) -> float:
        return self.half_a_lease_at

    @contextmanager
    def _holding(self) -> Iterator[Held]:
        yield Held(self.claim.token, self.claim.deadline)
