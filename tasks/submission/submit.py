"""Submitting: a task and its wake-up, in the caller's own transaction. It exists if that commits, and never if not.

with Session.begin() as session:
    session.add(invoice)
    submit(session, "invoice.import", {"invoice": 17}, key="invoice 17")

Whoever has nothing else to commit gives an engine: `submit(engine(), …)` is a transaction of its own.

Same key, same payload: the existing task. Same key, another payload: `IdempotencyConflict`. Equal is what the database
calls equal (jsonb). A thousand tasks are one round trip, and one wake-up per handler batch.

Whoever submits a key that another transaction is submitting waits for its end, and then meets its task, or nothing if
it was rolled back. `submit_many` goes through its keys in one order, whatever the order of its tasks (P14); two
transactions that call `submit` several times must take care of theirs. The same is true of partition keys: whoever
submits to one waits for the commit of whoever did so before, so that the order of a key is the order of commits (P9).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Engine

from models.driver_values import array, array_of_ids
from models.errors import CeleriacError, LedgerBusy
from models.prepared import Prepared
from models.sql import sql
from models.status import TaskStatus
from outbox.after_commit import begin, begin_at_once
from outbox.lease import Db, connection_of
from tasks.core import wakeups
from tasks.core.holders import actor
from tasks.core.task_ids import fresh_id, keyed_id
from tasks.submission.envelope import Checked, NewTask, checked

CHUNK: Final = 1000

# submit: what `ingest_submit_many` says (models/migrations/versions/0001_ledger.sql).
SUBMIT: Final = Prepared("""
    SELECT statuses, same, wakeup_ids, wakeups FROM ledger.ingest_submit_many(
        :ids, :types, :payloads, :contexts, :queues, :priorities, :keys, :max_attempts, :run_ats, :delays, :notifies,
        :partition_keys, :turns, :batches, :actor, :wakeup_holder, :wakeup_token, :wakeup_seconds, :wakeup_queues)
""")
DRAW_TURNS: Final = sql("SELECT ledger.ingest_draw_turns(:keys)")
# take_back: tasks that were submitted a moment ago in this transaction, as if they had not been.
TAKE_BACK: Final = sql("""
    WITH tasks AS (DELETE FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[]))),
    told AS (DELETE FROM ledger.ingest_task_transition WHERE task_id = ANY(CAST(:ids AS uuid[])))
    DELETE FROM ledger.outbox_event WHERE id = ANY(CAST(:wakeups AS bigint[]))
""")


class IdempotencyConflict(CeleriacError):
    """The key belongs to a task with another payload."""

    code = "idempotency_conflict"
    http_status = 409

    def __init__(self, task_id: uuid.UUID) -> None:
        super().__init__(f"The key belongs to the task {task_id}, which has another payload.")
        self.task_id = task_id


@dataclass(frozen=True, slots=True)
class Submitted:
    """A task that is in the ledger, and whether this call put it there."""

    task_id: uuid.UUID
    status: TaskStatus
    created: bool


def submit(
    session: Db | Engine,
    type: str,
    payload: Any = None,
    *,
    key: str | None = None,
    queue: str | None = None,
    priority: int = 5,
    run_at: datetime | timedelta | None = None,
    partition_key: str | None = None,
    max_attempts: int | None = None,
    context: Mapping[str, Any] | None = None,
    notify: str | None = None,
) -> Submitted:
    """Submit one task. `run_at` is a time or how long from now; `notify` names a destination for the final status.

    Through an engine it is a transaction of its own, in one round trip: committed when this returns.
    """
    context = {} if context is None else context
    new = NewTask(type, payload, key, queue, priority, run_at, partition_key, max_attempts, context, notify)
    return submit_many(session, [new])[0]


def submit_many(session: Db | Engine, tasks: Iterable[NewTask]) -> list[Submitted]:
    """Submit tasks, a thousand in one round trip, and say of each what became of it. All are checked first.

    All or none: when a key belongs to another task, those that were submitted before are taken back.
    """
    given = [checked(new) for new in tasks]
    if isinstance(session, Engine):
        with (begin_at_once if len(given) == 1 else begin)(session) as connection:
            return _submit_checked(connection, given)
    return _submit_checked(session, given)


def _submit_checked(session: Db, given: Sequence[Checked]) -> list[Submitted]:
    """Write in one order of types and keys, whatever the order of the tasks, so that two calls do not deadlock (P14)."""
    if not given:
        return []
    in_order = sorted(range(len(given)), key=lambda place: (given[place].new.type, given[place].new.key or ""))
    turns = _turns(session, given)
    written = _Written()
    found: dict[int, Submitted] = {}
    try:
        for start in range(0, len(given), CHUNK):
            places = in_order[start : start + CHUNK]
            submitted = _submit_chunk(session, [given[place] for place in places], _at(turns, places), written)
            found |= zip(places, submitted, strict=True)
    except CeleriacError:
        values = {"ids": array_of_ids(written.ids), "wakeups": written.wakeup_ids}
        connection_of(session).execute(TAKE_BACK, values)
        raise
    wakeups.publish_after_commit(session, written.wakeups)
    return [found[place] for place in range(len(given))]


def _turns(session: Db, given: Sequence[Checked]) -> list[int | None] | None:
    """Draw a place in its partition key for each task, in the order in which they were given.

    All keys are locked before anything is written. One chunk draws its places itself.
    """
    keys = [each.new.partition_key for each in given]
    if len(given) == 1 or not any(key is not None for key in keys):
        return None
    turns: list[int | None] = connection_of(session).execute(DRAW_TURNS, {"keys": array(keys)}).scalar_one()
    return turns


def _at(turns: Sequence[int | None] | None, places: Sequence[int]) -> str | None:
    return None if turns is None else array(turns[place] for place in places)


@dataclass(slots=True)
class _Written:
    """What one call has put into the ledger so far."""

    ids: list[uuid.UUID] = field(default_factory=list)
    wakeup_ids: list[int] = field(default_factory=list)
    wakeups: list[Any] = field(default_factory=list)  # those that this process must publish


def _submit_chunk(session: Db, chunk: Sequence[Checked], turns: str | None, written: _Written) -> list[Submitted]:
    ids = [_id(each) for each in chunk]
    values = {
        "ids": array_of_ids(ids),
        "types": array(each.new.type for each in chunk),
        "payloads": array(each.payload for each in chunk),
        "contexts": array(each.context for each in chunk),
        "queues": array(each.queue for each in chunk),
        "priorities": array(each.new.priority for each in chunk),
        "keys": array(each.new.key for each in chunk),
        "max_attempts": array(each.max_attempts for each in chunk),
        "run_ats": array(each.run_at for each in chunk),
        "delays": array(each.delay_seconds for each in chunk),
        "notifies": array(each.new.notify for each in chunk),
        "partition_keys": array(each.new.partition_key for each in chunk),
        "turns": turns,
        "batches": array(each.batch for each in chunk),
        "actor": actor(),
        **wakeups.lease_values(session, {each.queue for each in chunk}),
    }
    statuses, same, wakeup_ids, ours = SUBMIT.row(connection_of(session), values)
    if statuses is None:
        submitted = [Submitted(id_, TaskStatus.QUEUED, created=True) for id_ in ids]
        written.ids += ids
    else:
        submitted = []
        written.ids += [id_ for id_, status in zip(ids, statuses, strict=True) if status is None]
    written.wakeup_ids += wakeup_ids or ()
    written.wakeups += ours or ()
    return submitted or [_found(*each) for each in zip(ids, statuses, same, strict=True)]


def _found(id_: uuid.UUID, status: str | None, same: bool) -> Submitted:
    """What stands at the place of a task. None: it was put there now. Empty: it was pruned just now."""
    if status is None:
        return Submitted(id_, TaskStatus.QUEUED, created=True)
    if not status:
        raise LedgerBusy(f"The task {id_} was pruned at this very moment; submit it again.")
    if not same:
        raise IdempotencyConflict(id_)
    return Submitted(id_, TaskStatus(status), created=False)


def _id(each: Checked) -> uuid.UUID:
    return fresh_id() if each.new.key is None else keyed_id(each.new.type, each.new.key)
