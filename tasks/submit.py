"""Submitting: a task and its ring, in the caller's own transaction. It exists if that commits, and never if not.

with Session.begin() as session:
    session.add(invoice)
    submit(session, "invoice.import", {"invoice": 17}, key="invoice 17")

Same key, same payload: the existing task. Same key, another payload: `IdempotencyConflict`. Equal is what the database
calls equal (jsonb). A thousand tasks are one round trip, and one ring per handler batch.
"""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import text

from models.errors import CeleriacError
from models.status import TaskStatus
from outbox.lease import Db, connection_of
from tasks import rings
from tasks.actor import actor
from tasks.envelope import Checked, NewTask, checked
from tasks.identity import fresh_id, keyed_id

CHUNK: Final = 1000

# submit: → QUEUED, with its first transition and its ring; ids that exist are left alone.
SUBMIT: Final = text(f"""
    WITH clock AS MATERIALIZED (SELECT ledger_now() AS at),
    given AS MATERIALIZED (
        SELECT *, coalesce(due_at, (SELECT at FROM clock) + delay) AS starts_at
        FROM unnest(CAST(:id AS uuid[]), CAST(:type AS text[]), CAST(:payload AS text[]), CAST(:context AS text[]),
                    CAST(:queue AS text[]), CAST(:priority AS smallint[]), CAST(:key AS text[]),
                    CAST(:max_attempts AS integer[]), CAST(:due_at AS timestamptz[]), CAST(:delay AS interval[]),
                    CAST(:notify AS text[]))
             AS given(id, type, payload, context, queue, priority, key, max_attempts, due_at, delay, notify)),
    born AS (
        INSERT INTO ingest_task (id, type, payload, context, queue, priority, idempotency_key, max_attempts,
                                 next_retry_at, rung_at, notify, created_at, updated_at)
        SELECT id, type, CAST(payload AS jsonb), CAST(context AS jsonb), queue, priority, key, max_attempts,
               starts_at, coalesce(starts_at, at), notify, at, at
        FROM given CROSS JOIN clock WHERE NOT EXISTS (SELECT FROM task_tombstone t WHERE t.id = given.id)
        ORDER BY type, key, id
        ON CONFLICT (id) DO NOTHING
        RETURNING id, type, queue, priority, isolated, next_retry_at AS due_at),
    told AS (
        INSERT INTO ingest_task_transition (task_id, to_status, actor, created_at)
        SELECT id, 'QUEUED', :actor, at FROM born CROSS JOIN clock),
    {rings.rung("born")}
    SELECT (SELECT array_agg(id) FROM born), ours FROM rings
""")

# existing: what stands where a submit found its id taken; a tombstone is what is left of a pruned task (P10).
EXISTING: Final = text("""
    SELECT coalesce(task.status, stone.status),
           coalesce(task.payload = CAST(given.payload AS jsonb),
                    stone.payload_sha = ingest_payload_sha(CAST(given.payload AS jsonb)))
    FROM unnest(CAST(:id AS uuid[]), CAST(:payload AS text[])) WITH ORDINALITY AS given(id, payload, place)
    LEFT JOIN ingest_task task USING (id) LEFT JOIN task_tombstone stone USING (id)
    ORDER BY place
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
    session: Db,
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
    """Submit one task. `run_at` is a time or how long from now; `notify` names a destination for the final status."""
    new = NewTask(type, payload, key, queue, priority, run_at, partition_key, max_attempts, context or {}, notify)
    return submit_many(session, [new])[0]


def submit_many(session: Db, tasks: Iterable[NewTask]) -> list[Submitted]:
    """Submit tasks, a thousand in one round trip, and say of each what became of it. All are checked first."""
    written = [checked(new) for new in tasks]
    submitted: list[Submitted] = []
    for start in range(0, len(written), CHUNK):
        submitted += _submit_chunk(session, written[start : start + CHUNK])
    return submitted


def _submit_chunk(session: Db, chunk: Sequence[Checked]) -> list[Submitted]:
    ids = [keyed_id(each.new.type, each.new.key) if each.new.key else fresh_id() for each in chunk]
    values = {
        "id": ids,
        "type": [each.new.type for each in chunk],
        "payload": [each.payload for each in chunk],
        "context": [each.context for each in chunk],
        "queue": [each.queue for each in chunk],
        "priority": [each.new.priority for each in chunk],
        "key": [each.new.key for each in chunk],
        "max_attempts": [each.max_attempts for each in chunk],
        "due_at": [each.due_at for each in chunk],
        "delay": [each.delay for each in chunk],
        "notify": [each.new.notify for each in chunk],
        "actor": actor(),
        **rings.ring_values(session, {each.queue for each in chunk}),
    }
    born, ours = connection_of(session).execute(SUBMIT, values).one()
    rings.publish_after_commit(session, ours)
    return _told_apart(session, ids, chunk, set(born or ()))


def _told_apart(
    session: Db, ids: Sequence[uuid.UUID], chunk: Sequence[Checked], born: set[uuid.UUID]
) -> list[Submitted]:
    """Which of them were put there just now, and what the others met; of twins in one chunk the first is put there."""
    submitted: list[Submitted | None] = []
    for id_ in ids:
        submitted.append(Submitted(id_, TaskStatus.QUEUED, created=True) if id_ in born else None)
        born.discard(id_)
    met = [place for place, found in enumerate(submitted) if found is None]
    if met:
        values = {"id": [ids[place] for place in met], "payload": [chunk[place].payload for place in met]}
        for place, (status, same) in zip(met, connection_of(session).execute(EXISTING, values), strict=True):
            if not same:
                raise IdempotencyConflict(ids[place])
            submitted[place] = Submitted(ids[place], TaskStatus(status), created=False)
    return [found for found in submitted if found is not None]
