"""Wake-ups: whatever makes a task runnable writes its wake-up, an outbox event, in the same statement (P7).

A wake-up is a hint and disposable: the guard decides. One wake-up holds tasks of one type, queue, priority and due time, at
most a batch of their handler (P4); a task that must run alone has a wake-up of its own (P5). A wake-up that is due at once is
born leased to this process, which publishes it right after the commit (P18).
"""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from models.driver_values import array
from outbox import after_commit
from outbox.after_commit_publisher import submitter
from outbox.lease import ClaimedEvent, Db
from tasks.core.batch_size import batch_of
from tasks.core.registry import DEFAULT_BATCH, handlers

WAKEUP: Final = "celery:"


def wake(source: str) -> str:
    """The CTEs `woken` and `wakeups`: one event per batch of what `source` yields, and those of them that are ours.

    `source` has id, type, queue, priority, isolated and due_at, which is NULL if it is due now; `clock` is there.
    """
    return f"""
    woken AS (
        INSERT INTO ledger.outbox_event (destination, payload, headers, next_retry_at, created_at,
                                  locked_by, locked_at, lease_token, lease_until)
        SELECT '{WAKEUP}' || queue,
               jsonb_build_object('type', type, 'ids', jsonb_agg(id ORDER BY number), 'batch', batch),
               jsonb_build_object('priority', priority), due_at, clock.at,
               CASE WHEN leased THEN :wakeup_holder END, CASE WHEN leased THEN clock.at END,
               CASE WHEN leased THEN CAST(:wakeup_token AS uuid) END,
               CASE WHEN leased THEN clock.at + make_interval(secs => :wakeup_seconds) END
        FROM (
            SELECT source.*, due_at IS NULL AND queue = ANY(CAST(:wakeup_queues AS text[])) AS leased,
                   coalesce(CAST(CAST(:batches AS jsonb) ->> type AS integer), {DEFAULT_BATCH}) AS batch,
                   row_number() OVER (PARTITION BY queue, type, priority, due_at, isolated ORDER BY id) - 1 AS number
            FROM {source} AS source) AS numbered CROSS JOIN clock
        GROUP BY queue, type, priority, due_at, batch, leased, clock.at,
                 CASE WHEN isolated THEN number ELSE number / batch END, isolated
        RETURNING id, destination, payload, headers, created_at, lease_token),
    wakeups AS (
        SELECT coalesce(jsonb_agg(jsonb_build_array(id, destination, payload, headers, created_at)), '[]') AS ours
        FROM woken WHERE lease_token IS NOT NULL)"""


def wakeup_values(db: Db, queues: Collection[str]) -> dict[str, Any]:
    """Return the parameters of `wake`: how large batches are, and which wake-ups this process publishes itself."""
    batches = json.dumps({name: batch_of(handler) for name, handler in handlers().items()})
    return {**lease_values(db, queues), "batches": batches}


def lease_values(db: Db, queues: Collection[str]) -> dict[str, Any]:
    """Return the lease of wake-ups that this process publishes right after the commit, and their queues."""
    ours = submitter()
    watched = after_commit.is_watched(db)
    return {
        "wakeup_holder": ours.worker_id,
        "wakeup_token": ours.lease_token,
        "wakeup_seconds": ours.lease_seconds,
        "wakeup_queues": array(queue for queue in queues if watched and ours.accepts(WAKEUP + queue)),
    }


def publish_after_commit(db: Db, wakeups: Sequence[Sequence[Any]]) -> None:
    """What `wakeups` returned: wake-ups that this process must publish when its transaction has committed."""
    if wakeups:
        token = submitter().lease_token
        after_commit.publish_after_commit(db, [_claimed(wakeup, token) for wakeup in wakeups])


def _claimed(wakeup: Sequence[Any], token: Any) -> ClaimedEvent:
    id_, destination, payload, headers, created_at = wakeup
    since = datetime.fromisoformat(created_at)
    no_headers: Mapping[str, Any] = headers or {}
    return ClaimedEvent(id_, destination, payload, None, no_headers, 0, token, since)
