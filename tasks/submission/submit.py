"""Submit tasks: a task and its wake-up are inserted in the caller's own transaction.

with Session.begin() as session:
    session.add(invoice)
    submit(session, "invoice.import", {"invoice": 17}, key="invoice 17")

The task exists if and only if that transaction commits. A caller with nothing else to commit gives an engine:
`submit(engine(), …)` is a transaction of its own.

Idempotency keys. Submitting a key again with an equal payload returns the existing task; with another payload it raises
`IdempotencyConflict`. The database decides what is equal (jsonb). A submit waits for the end of a transaction that is
submitting the same key.

Partition keys. A submit waits for the commit of the previous transaction with the same partition key, so that the order
of a key is the order of commits.

`submit_many` locks keys in sorted order, so two calls do not deadlock. Transactions that call `submit` several times
must keep to one order themselves. If two of them deadlock nevertheless, PostgreSQL ends one, which gets `LedgerBusy`:
its caller rolls back and repeats the whole transaction. A lock that is not free in time (`lock_timeout`) raises
`LedgerBusy`, too. A serialization failure stays SQLAlchemy's error, which callers in those isolation levels handle.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

import settings
import tracing
from models.driver_values import array, array_of_ids
from models.errors import CeleriacError, LedgerBusy
from models.prepared_statements import Prepared
from models.sql import sql
from models.status import TaskStatus
from outbox.after_commit import begin, begin_autocommit
from outbox.lease import Db, connection_of
from tasks.core import wakeups
from tasks.core.holders import actor
from tasks.core.registered_types import registered_queues, registered_type_names
from tasks.core.registry import UnknownType, handlers
from tasks.core.task_ids import fresh_id, keyed_id
from tasks.submission.closed_queues import are_accepted, refusal_of
from tasks.submission.envelope import CheckedTask, NewTask, UnknownQueue, check_task

CHUNK: Final = 1000
BUSY: Final = {
    "40P01": "This transaction and another one waited for each other's keys (deadlock).",
    "55P03": "Another transaction holds the same key for longer than the lock timeout.",
}

# submit: → QUEUED. The function is in models/migrations/versions/0001_ledger.sql.
SUBMIT: Final = Prepared("""
    SELECT statuses, same, wakeup_ids, wakeups, unknown_type, unknown_queue, refusing_queue
    FROM ledger.ingest_submit_many(
        :ids, :types, :payloads, :contexts, :queues, :priorities, :keys, :max_attempts, :run_ats, :delays, :notifies,
        :partition_keys, :turns, :batches, :actor, :wakeup_holder, :wakeup_token, :wakeup_seconds, :wakeup_queues, true,
        :refusable, :expires_ats, :expire_delays)
""")
DRAW_TURNS: Final = sql("SELECT ledger.ingest_draw_turns(:keys)")
# undo: QUEUED → deleted, for tasks that this transaction has just submitted.
UNDO: Final = sql("""
    WITH tasks AS (DELETE FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[]))),
    history AS (DELETE FROM ledger.ingest_task_transition WHERE task_id = ANY(CAST(:ids AS uuid[])))
    DELETE FROM ledger.outbox_event WHERE id = ANY(CAST(:wakeups AS bigint[]))
""")


class IdempotencyConflict(CeleriacError):
    """The idempotency key belongs to a task with another payload.

    The same key was used before for the same type, with a different payload.
    """

    code = "idempotency_conflict"
    remedy = "Use a new key for different work. The message names the existing task."
    http_status = 409

    def __init__(self, task_id: uuid.UUID) -> None:
        super().__init__(f"The key belongs to the task {task_id}, which has another payload.")
        self.task_id = task_id


@dataclass(frozen=True, slots=True)
class Submitted:
    """A task that is in the ledger, and whether this call created it."""

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
    priority: int | None = None,
    run_at: datetime | timedelta | None = None,
    partition_key: str | None = None,
    max_attempts: int | None = None,
    context: Mapping[str, Any] | None = None,
    notify: str | None = None,
    expires: datetime | timedelta | float | None = None,
) -> Submitted:
    """Submit one task. `run_at` is a time or a duration from now; `notify` names a destination for the final status.

    `expires` is a time, or a duration or seconds from now: a task that has not started by then is DISCARDED.

    Without queue, priority and max_attempts, those of the handler apply. A process that does not have the handler takes
    them from the ledger, where workers have registered them. With an engine, the task is committed when this returns,
    after one round trip.
    """
    context = {} if context is None else context
    new = NewTask(type, payload, key, queue, priority, run_at, partition_key, max_attempts, context, notify, expires)
    return submit_many(session, [new])[0]


def submit_many(session: Db | Engine, tasks: Iterable[NewTask]) -> list[Submitted]:
    """Submit tasks, a thousand per round trip, and return a result for each.

    All tasks are checked first, and all or none are submitted: a conflict, or a type that is unknown here and in the
    ledger, deletes those that this call has inserted.
    """
    if not tracing.is_on():
        return _submit(session, [check_task(new) for new in tasks])
    news = list(tasks)
    contexts: dict[str, list[Any]] = defaultdict(list)
    for new in news:
        contexts[str(new.type)].append(new.context)
    with tracing.submitting(contexts) as traces:
        return _submit(session, [check_task(new, traceparent=traces[str(new.type)]) for new in news])


def _submit(session: Db | Engine, given: Sequence[CheckedTask]) -> list[Submitted]:
    try:
        if isinstance(session, Engine):
            with (begin_autocommit if len(given) == 1 else begin)(session) as connection:
                return _submit_checked(connection, given)
        return _submit_checked(session, given)
    except DBAPIError as error:
        if message := BUSY.get(getattr(error.orig, "pgcode", None) or ""):
            raise LedgerBusy(f"{message} Nothing was submitted: repeat the whole transaction.") from error
        raise


class Chunk(NamedTuple):
    """Up to a thousand tasks as the parameters of SUBMIT, as far as they are known before the transaction."""

    ids: Sequence[uuid.UUID]
    tasks: Sequence[CheckedTask]
    values: dict[str, Any]


class PreparedTasks(NamedTuple):
    """Tasks whose ids are known already, in the order that was given, and as chunks sorted by type and key."""

    tasks: Sequence[tuple[uuid.UUID, CheckedTask]]
    chunks: Sequence[Chunk]


def prepare(tasks: Sequence[tuple[uuid.UUID, CheckedTask]]) -> PreparedTasks:
    """Prepare tasks for `submit_prepared`. Their ids must not repeat."""
    in_order = sorted(tasks, key=lambda each: (each[1].new.type, each[1].new.key or ""))
    parts = [in_order[start : start + CHUNK] for start in range(0, len(in_order), CHUNK)]
    return PreparedTasks(tasks, [_chunk([id_ for id_, _ in part], [checked for _, checked in part]) for part in parts])


def submit_prepared(session: Db, prepared: PreparedTasks) -> dict[uuid.UUID, Submitted | IdempotencyConflict]:
    """Submit tasks in one transaction. Return those that existed before; a conflict does not undo the others.

    A type or queue that is unknown raises, and nothing was submitted then.
    """
    turns = _draw_turns(session, [checked for _, checked in prepared.tasks])
    turn_of = {} if turns is None else {id_: turn for (id_, _), turn in zip(prepared.tasks, turns, strict=True)}
    found: dict[uuid.UUID, Submitted | IdempotencyConflict] = {}
    written = _Written()
    for chunk in prepared.chunks:
        chunk_turns = None if turns is None else array(turn_of[id_] for id_ in chunk.ids)
        rows = _insert(session, chunk, chunk_turns, written)
        found |= {row[0]: _existing_or_conflict(*row) for row in rows or () if row[1] is not None}
    wakeups.publish_after_commit(session, written.wakeups)
    return found


def submit_each(session: Db, tasks: Sequence[tuple[uuid.UUID, CheckedTask]]) -> list[Submitted | IdempotencyConflict]:
    """Submit tasks as `submit_prepared` does, and return a result for each."""
    existing = submit_prepared(session, prepare(tasks))
    return [existing.get(id_) or _created(id_) for id_, _ in tasks]


def _submit_checked(session: Db, given: Sequence[CheckedTask]) -> list[Submitted]:
    """Insert the tasks sorted by type and key, so that two calls do not deadlock."""
    if not given:
        return []
    in_order = sorted(range(len(given)), key=lambda place: (given[place].new.type, given[place].new.key or ""))
    turns = _draw_turns(session, given)
    written = _Written()
    found: dict[int, Submitted] = {}
    try:
        for start in range(0, len(given), CHUNK):
            places = in_order[start : start + CHUNK]
            chunk_turns = None if turns is None else array(turns[place] for place in places)
            submitted = _submit_chunk(session, [given[place] for place in places], chunk_turns, written)
            found |= zip(places, submitted, strict=True)
    except CeleriacError:
        values = {"ids": array_of_ids(written.ids), "wakeups": written.wakeup_ids}
        connection_of(session).execute(UNDO, values)
        raise
    wakeups.publish_after_commit(session, written.wakeups)
    return [found[place] for place in range(len(given))]


def _draw_turns(session: Db, given: Sequence[CheckedTask]) -> list[int | None] | None:
    """Lock all partition keys, and draw a `key_seq` for each task in the given order.

    Return None if there are no keys, or a single task: SUBMIT draws its `key_seq` itself.
    """
    keys = [each.new.partition_key for each in given]
    if len(given) == 1 or not any(key is not None for key in keys):
        return None
    turns: list[int | None] = connection_of(session).execute(DRAW_TURNS, {"keys": array(keys)}).scalar_one()
    return turns


@dataclass(slots=True)
class _Written:
    """What one call has inserted so far."""

    ids: list[uuid.UUID] = field(default_factory=list)
    wakeup_ids: list[int] = field(default_factory=list)
    wakeups: list[Any] = field(default_factory=list)  # those that this process must publish


def _submit_chunk(session: Db, chunk: Sequence[CheckedTask], turns: str | None, written: _Written) -> list[Submitted]:
    ids = [id_of(each.new) for each in chunk]
    rows = _insert(session, _chunk(ids, chunk), turns, written)
    return [_created(id_) for id_ in ids] if rows is None else [_existing(*row) for row in rows]


def id_of(new: NewTask) -> uuid.UUID:
    """Return the id of a task: the same for every submit of its key, otherwise a new one."""
    return fresh_id() if new.key is None else keyed_id(new.type, new.key)


def _chunk(ids: Sequence[uuid.UUID], tasks: Sequence[CheckedTask]) -> Chunk:
    expires = any(each.new.expires is not None for each in tasks)
    values = {
        "ids": array_of_ids(ids),
        "types": array(each.new.type for each in tasks),
        "payloads": array(each.payload for each in tasks),
        "contexts": array(each.context for each in tasks),
        "queues": array(each.queue for each in tasks),
        "priorities": array(each.priority for each in tasks),
        "keys": array(each.new.key for each in tasks),
        "max_attempts": array(each.max_attempts for each in tasks),
        "run_ats": array(each.run_at for each in tasks),
        "delays": array(each.delay_seconds for each in tasks),
        "notifies": array(each.new.notify for each in tasks),
        "partition_keys": array(each.new.partition_key for each in tasks),
        "batches": array(each.batch for each in tasks),
        "expires_ats": array(each.expires_at for each in tasks) if expires else None,
        "expire_delays": array(each.expire_seconds for each in tasks) if expires else None,
    }
    return Chunk(ids, tasks, values)


def _insert(
    session: Db, chunk: Chunk, turns: str | None, written: _Written
) -> list[tuple[uuid.UUID, str | None, bool]] | None:
    """Insert tasks; return None if all are new.

    Otherwise return for each its id, its status if it existed before, and whether the payload is the same.
    """
    values = {
        **chunk.values,
        "turns": turns,
        "actor": actor(),
        "refusable": not are_accepted(),
        **wakeups.lease_values(session, _queues_of(chunk.tasks)),
    }
    row = SUBMIT.row(connection_of(session), values)
    statuses, same, wakeup_ids, ours, unknown_type, unknown_queue, refusing_queue = row
    if unknown_type is not None or unknown_queue is not None:
        raise _unknown(session, unknown_type, unknown_queue)
    if refusing_queue is not None:
        raise refusal_of(connection_of(session), refusing_queue)
    written.wakeup_ids += wakeup_ids or ()
    written.wakeups += ours or ()
    if statuses is None:
        written.ids += chunk.ids
        return None
    written.ids += [id_ for id_, status in zip(chunk.ids, statuses, strict=True) if status is None]
    return list(zip(chunk.ids, statuses, same, strict=True))


def _queues_of(chunk: Sequence[CheckedTask]) -> set[str]:
    """Return the queues of these tasks; all queues if the ledger is to choose one."""
    queues = {each.queue for each in chunk}
    return set(settings.current().ingest_queues) if None in queues else {queue for queue in queues if queue}


def _unknown(session: Db, unknown_type: str | None, unknown_queue: str | None) -> CeleriacError:
    """Return the error for a type or a queue that neither this process nor a worker knows."""
    connection = connection_of(session)
    if unknown_type is not None:
        known = ", ".join(sorted({*handlers(), *registered_type_names(connection)})) or "none"
        return UnknownType(
            f"There is no handler for {unknown_type!r}, neither here nor in a worker. Known: {known}. INGEST_HANDLERS"
            " names the modules with handlers."
        )
    queues = ", ".join(registered_queues(connection))
    return UnknownQueue(f"There is no queue {unknown_queue!r}; the workers know {queues}.")


def _created(id_: uuid.UUID) -> Submitted:
    return Submitted(id_, TaskStatus.QUEUED, created=True)


def _existing(id_: uuid.UUID, status: str | None, same: bool) -> Submitted:
    """Return the task that has this id. `status` is None if it was created now, and empty if it was pruned just now."""
    if status is None:
        return _created(id_)
    if not status:
        raise LedgerBusy(f"The task {id_} was pruned at this moment; submit it again.")
    if not same:
        raise IdempotencyConflict(id_)
    return Submitted(id_, TaskStatus(status), created=False)


def _existing_or_conflict(id_: uuid.UUID, status: str | None, same: bool) -> Submitted | IdempotencyConflict:
    try:
        return _existing(id_, status, same)
    except IdempotencyConflict as conflict:
        return conflict
