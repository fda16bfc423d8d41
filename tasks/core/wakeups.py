"""Wake-ups: outbox events that tell workers which tasks may run.

Every statement that makes a task runnable also inserts its wake-up (docs/protocol.md, Wake-up rule). A wake-up is only
a hint: the claim decides whether the task runs, so a wake-up may be delivered twice or lost without harm. A wake-up
names tasks of one type, queue, priority and due time, at most one batch of their handler. An isolated task has a
wake-up of its own with a batch of 1, so that publishers do not combine it with others. A wake-up that is due now is
leased at insert to this process, which publishes it right after the commit; if the process dies before, the lease
expires and the relay publishes it. Those of a paused queue are left to the relay, which drops them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from models.driver_values import array, array_of_ids
from models.sql import sql
from outbox import after_commit
from outbox.after_commit_publisher import after_commit_publisher
from outbox.destinations import CELERY
from outbox.lease import ClaimedEvent, Db, connection_of
from tasks.core.batch_size import batch_of
from tasks.core.due_times import IS_PAUSED, OPEN
from tasks.core.registry import DEFAULT_BATCH, handlers


def insert_wakeups(source: str) -> str:
    """Return CTEs that insert one wake-up per batch of the tasks in `source`.

    `woken` has the inserted events; `wakeups.ours` has those that this process must publish. `source` needs the columns
    id, type, queue, priority, isolated and due_at (NULL: due now). The statement needs a CTE `clock`.
    """
    return f"""
    woken AS (
        INSERT INTO ledger.outbox_event (destination, payload, headers, next_retry_at, created_at,
                                  locked_by, locked_at, lease_token, lease_until)
        SELECT '{CELERY}' || queue,
               jsonb_build_object('type', type, 'ids', jsonb_agg(id ORDER BY number), 'batch', batch),
               jsonb_build_object('priority', priority), due_at, clock.at,
               CASE WHEN leased THEN :wakeup_holder END, CASE WHEN leased THEN clock.at END,
               CASE WHEN leased THEN CAST(:wakeup_token AS uuid) END,
               CASE WHEN leased THEN clock.at + make_interval(secs => :wakeup_seconds) END
        FROM (
            SELECT source.*,
                   due_at IS NULL AND queue = ANY(CAST(:wakeup_queues AS text[])) AND NOT {IS_PAUSED} AS leased,
                   CASE WHEN isolated THEN 1
                        ELSE coalesce(CAST(CAST(:batches AS jsonb) ->> type AS integer), {DEFAULT_BATCH}) END AS batch,
                   row_number() OVER (PARTITION BY queue, type, priority, due_at, isolated ORDER BY id) - 1 AS number
            FROM {source} AS source) AS numbered CROSS JOIN clock
        GROUP BY queue, type, priority, due_at, batch, leased, clock.at, number / batch, isolated
        RETURNING id, destination, payload, headers, created_at, lease_token),
    wakeups AS (
        SELECT coalesce(jsonb_agg(jsonb_build_array(id, destination, payload, headers, created_at)), '[]') AS ours
        FROM woken WHERE lease_token IS NOT NULL)"""


# wake_again: QUEUED|RETRYING → unchanged, with a new wake-up, due now or in some seconds. It replaces the dead wake-ups
# that name only these tasks: otherwise every repetition for a queue that refuses them would leave one more, for ever.
_WAITED: Final = """CASE WHEN :in_line THEN
            at - greatest(coalesce(task.next_retry_at, task.created_at), task.updated_at) ELSE '0' END"""
WAKE_AGAIN: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    held AS MATERIALIZED (
        SELECT id FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[])) AND {OPEN}
          AND (:seconds <= 0 OR last_wakeup_at IS NULL OR last_wakeup_at <= (SELECT at FROM clock))
        ORDER BY id FOR NO KEY UPDATE SKIP LOCKED),
    waiting AS (
        UPDATE ledger.ingest_task task
        SET last_wakeup_at = at + greatest(make_interval(secs => :seconds), {_WAITED}),
            updated_at = CASE WHEN :restarts_grace THEN at ELSE task.updated_at END
        FROM held, clock WHERE task.id = held.id
        RETURNING task.id, type, queue, priority, isolated, CASE WHEN :seconds > 0 THEN last_wakeup_at END AS due_at),
    dead AS MATERIALIZED (
        SELECT id FROM ledger.outbox_event
        WHERE status = 'DEAD' AND destination LIKE '{CELERY}%'
          AND payload -> 'ids' ?| ARRAY(SELECT CAST(id AS text) FROM waiting)
          AND payload -> 'ids' <@ (SELECT jsonb_agg(id) FROM waiting)
        ORDER BY id FOR UPDATE SKIP LOCKED),
    replaced AS (DELETE FROM ledger.outbox_event event USING dead WHERE event.id = dead.id),
    replaced_audits AS (DELETE FROM ledger.outbox_audit audit USING dead WHERE audit.outbox_id = dead.id),
    {insert_wakeups("waiting")}
    SELECT (SELECT count(*) FROM waiting), (SELECT count(*) FROM woken), ours FROM wakeups
""")


def wakeup_values(db: Db, queues: Collection[str]) -> dict[str, Any]:
    """Return the parameters of `insert_wakeups`: the sizes of batches, and the lease of our own wake-ups."""
    batches = json.dumps({name: batch_of(handler) for name, handler in handlers().items()})
    return {**lease_values(db, queues), "batches": batches}


def lease_values(db: Db, queues: Collection[str]) -> dict[str, Any]:
    """Return the lease of the wake-ups that this process publishes right after the commit, and their queues."""
    ours = after_commit_publisher()
    watched = after_commit.is_watched(db)
    return {
        "wakeup_holder": ours.worker_id,
        "wakeup_token": ours.lease_token,
        "wakeup_seconds": ours.lease_seconds,
        "wakeup_queues": array(queue for queue in queues if watched and ours.accepts(CELERY + queue)),
    }


@dataclass(frozen=True, slots=True)
class Woken:
    """How many tasks got a wake-up, and in how many events."""

    tasks: int = 0
    wakeups: int = 0

    def __add__(self, other: Woken) -> Woken:
        return Woken(self.tasks + other.tasks, self.wakeups + other.wakeups)


def wake_again(
    db: Db,
    ids: Sequence[uuid.UUID],
    *,
    queues: Collection[str],
    after_seconds: float = 0,
    waits_in_line: bool = False,
    restarts_grace: bool = False,
) -> Woken:
    """Insert new wake-ups for waiting tasks. Their status and their attempts do not change.

    With `after_seconds`, a task that has a wake-up for later gets no second one: otherwise a message that is delivered
    twice would become two messages for ever. `waits_in_line` backs off: the longer a task has waited for its turn, the
    later its next wake-up. `restarts_grace`: if this wake-up is lost, that is noticed after one grace, however long the
    task has waited. This process publishes wake-ups for `queues`; the relay publishes the others.
    """
    if not ids:
        return Woken()
    values = {
        "ids": array_of_ids(ids),
        "seconds": after_seconds,
        "in_line": waits_in_line,
        "restarts_grace": restarts_grace,
        **wakeup_values(db, queues),
    }
    tasks, events, ours = connection_of(db).execute(WAKE_AGAIN, values).one()
    publish_after_commit(db, ours)
    return Woken(tasks, events)


def publish_after_commit(db: Db, wakeups: Sequence[Sequence[Any]]) -> None:
    """Publish the wake-ups in `wakeups.ours` (see `insert_wakeups`) when the transaction has committed."""
    if wakeups:
        token = after_commit_publisher().lease_token
        after_commit.publish_after_commit(db, [_claimed(wakeup, token) for wakeup in wakeups])


def _claimed(wakeup: Sequence[Any], token: uuid.UUID) -> ClaimedEvent:
    id_, destination, payload, headers, created_at = wakeup
    return ClaimedEvent(id_, destination, payload, None, headers or {}, 0, token, datetime.fromisoformat(created_at))
