"""Submitting: a task and its ring, in the caller's own transaction. It exists if that commits, and never if not.

with Session.begin() as session:
    session.add(invoice)
    submit(session, "invoice.import", {"invoice": 17}, key="invoice 17")

Whoever has nothing else to commit gives an engine: `submit(engine(), …)` is a transaction of its own.

Same key, same payload: the existing task. Same key, another payload: `IdempotencyConflict`. Equal is what the database
calls equal (jsonb). A thousand tasks are one round trip, and one ring per handler batch.

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
from models.status import TaskStatus
from outbox.after_commit import begin, begin_at_once
from outbox.lease import Db, connection_of
from tasks.core import wakeups
from tasks.core.holders import actor
from tasks.core.task_ids import fresh_id, keyed_id
from tasks.submission.envelope import Checked, NewTask, checked
from tasks.submission.statements import DRAW_TURNS, EXISTING, SUBMIT, SUBMIT_ONE, TAKE_BACK

CHUNK: Final = 1000


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
    one = checked(new)
    if isinstance(session, Engine):
        with begin_at_once(session) as connection:
            return _submit_one(connection, one)
    return _submit_one(session, one)


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
    if len(given) == 1:
        return [_submit_one(session, given[0])]
    in_order = sorted(range(len(given)), key=lambda place: (given[place].new.type, given[place].new.key or ""))
    turns = _turns(session, given)
    written = _Written()
    submitted: list[Submitted] = []
    try:
        for start in range(0, len(given), CHUNK):
            places = in_order[start : start + CHUNK]
            chunk = [given[place] for place in places]
            submitted += _submit_chunk(session, chunk, [turns[place] for place in places], written)
    except CeleriacError:
        connection_of(session).execute(TAKE_BACK, {"ids": array_of_ids(written.ids), "rings": written.rings})
        raise
    wakeups.publish_after_commit(session, written.ours)
    found = dict(zip(in_order, submitted, strict=True))
    return [found[place] for place in range(len(given))]


def _turns(session: Db, given: Sequence[Checked]) -> list[int | None]:
    """The place of each in its partition key: in the order in which they were given, whatever the order of writing."""
    keys = [each.new.partition_key for each in given]
    named = [key for key in keys if key is not None]
    if not named:
        return [None] * len(keys)
    values = {"keys": array(sorted(set(named))), "count": len(named)}
    drawn = iter(sorted(connection_of(session).execute(DRAW_TURNS, values).scalars()))
    return [None if key is None else next(drawn) for key in keys]


@dataclass(slots=True)
class _Written:
    """What one call has put into the ledger so far."""

    ids: list[uuid.UUID] = field(default_factory=list)
    rings: list[int] = field(default_factory=list)
    ours: list[Any] = field(default_factory=list)  # of the rings, those that this process must publish


def _submit_one(session: Db, one: Checked) -> Submitted:
    new, id_ = one.new, _id(one)
    values = {
        "id": id_,
        "type": new.type,
        "payload": one.payload,
        "context": one.context,
        "queue": one.queue,
        "priority": new.priority,
        "key": new.key,
        "max_attempts": one.max_attempts,
        "run_at": one.run_at,
        "delay_seconds": one.delay_seconds,
        "notify": new.notify,
        "partition_key": new.partition_key,
        "actor": actor(),
        "batch": one.batch,
        **wakeups.holder_values(session, one.queue),
    }
    created, status, same, ring, stamp = SUBMIT_ONE.row(connection_of(session), values)
    if not created:
        return _met(id_, status, same=same)
    if ring is not None:
        payload = {"type": new.type, "ids": [str(id_)], "batch": one.batch}
        wakeups.publish_one_after_commit(session, ring, one.queue, payload, priority=new.priority, since=stamp)
    return Submitted(id_, TaskStatus.QUEUED, created=True)


def _submit_chunk(
    session: Db, chunk: Sequence[Checked], turns: Sequence[int | None], written: _Written
) -> list[Submitted]:
    ids = [_id(each) for each in chunk]
    values = {
        "id": array_of_ids(ids),
        "type": array(each.new.type for each in chunk),
        "payload": array(each.payload for each in chunk),
        "context": array(each.context for each in chunk),
        "queue": array(each.queue for each in chunk),
        "priority": array(each.new.priority for each in chunk),
        "key": array(each.new.key for each in chunk),
        "max_attempts": array(each.max_attempts for each in chunk),
        "run_at": array(each.run_at for each in chunk),
        "delay_seconds": array(each.delay_seconds for each in chunk),
        "notify": array(each.new.notify for each in chunk),
        "partition_key": array(each.new.partition_key for each in chunk),
        "key_seq": array(turns),
        "actor": actor(),
        **wakeups.ring_values(session, {each.queue for each in chunk}),
    }
    born, ring_ids, ours = connection_of(session).execute(SUBMIT, values).one()
    written.rings += ring_ids
    written.ours += ours
    written.ids += ids if born is None else born
    if born is None:
        return [Submitted(id_, TaskStatus.QUEUED, created=True) for id_ in ids]
    return _told_apart(session, ids, chunk, set(born))


def _told_apart(
    session: Db, ids: Sequence[uuid.UUID], chunk: Sequence[Checked], born: set[uuid.UUID]
) -> list[Submitted]:
    """Which of them were put there just now, and what the others met; of twins in one chunk the first is put there."""
    submitted: list[Submitted | None] = []
    for id_ in ids:
        submitted.append(Submitted(id_, TaskStatus.QUEUED, created=True) if id_ in born else None)
        born.discard(id_)
    met = [place for place, found in enumerate(submitted) if found is None]
    values = {"id": array_of_ids(ids[place] for place in met), "payload": array(chunk[place].payload for place in met)}
    for place, (status, same) in zip(met, connection_of(session).execute(EXISTING, values), strict=True):
        submitted[place] = _met(ids[place], status, same=same)
    return [found for found in submitted if found is not None]


def _met(id_: uuid.UUID, status: str | None, *, same: bool) -> Submitted:
    if status is None:
        raise LedgerBusy(f"The task {id_} was pruned at this very moment: submit it again.")
    if not same:
        raise IdempotencyConflict(id_)
    return Submitted(id_, TaskStatus(status), created=False)


def _id(each: Checked) -> uuid.UUID:
    return fresh_id() if each.new.key is None else keyed_id(each.new.type, each.new.key)
