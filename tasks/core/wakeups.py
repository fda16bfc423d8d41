"""Rings: whatever makes a task runnable writes its ring, an outbox event, in the same statement (P7).

A ring is a hint and disposable: the guard decides. One ring holds tasks of one type, queue, priority and due time, at
most a batch of their handler (P4); a task that must run alone has a ring of its own (P5). A ring that is due at once is
born leased to this process, which publishes it right after the commit (P18).
"""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from outbox import after_commit
from outbox.after_commit_publisher import submitter
from outbox.lease import ClaimedEvent, Db
from tasks.core.batch_size import batch_of
from tasks.core.registry import DEFAULT_BATCH, handlers

RING: Final = "celery:"


def rung(source: str) -> str:
    """The CTEs `rung` and `rings`: one event per batch of what `source` yields, and those of them that are ours.

    `source` has id, type, queue, priority, isolated and due_at, which is NULL if it is due now; `clock` is there.
    """
    return f"""
    rung AS (
        INSERT INTO outbox_event (destination, payload, headers, next_retry_at, created_at,
                                  locked_by, locked_at, lease_token, lease_until)
        SELECT '{RING}' || queue,
               jsonb_build_object('type', type, 'ids', jsonb_agg(id ORDER BY number), 'batch', batch),
               jsonb_build_object('priority', priority), due_at, clock.at,
               CASE WHEN leased THEN :ring_holder END, CASE WHEN leased THEN clock.at END,
               CASE WHEN leased THEN CAST(:ring_token AS uuid) END,
               CASE WHEN leased THEN clock.at + make_interval(secs => :ring_seconds) END
        FROM (
            SELECT source.*, due_at IS NULL AND queue = ANY(CAST(:ring_queues AS text[])) AS leased,
                   coalesce(CAST(CAST(:batches AS jsonb) ->> type AS integer), {DEFAULT_BATCH}) AS batch,
                   row_number() OVER (PARTITION BY queue, type, priority, due_at, isolated ORDER BY id) - 1 AS number
            FROM {source} AS source) AS numbered CROSS JOIN clock
        GROUP BY queue, type, priority, due_at, batch, leased, clock.at,
                 CASE WHEN isolated THEN number ELSE number / batch END, isolated
        RETURNING id, destination, payload, headers, created_at, lease_token),
    rings AS (
        SELECT coalesce(jsonb_agg(jsonb_build_array(id, destination, payload, headers, created_at)), '[]') AS ours
        FROM rung WHERE lease_token IS NOT NULL)"""


def ring_values(db: Db, queues: Collection[str]) -> dict[str, Any]:
    """The parameters of `rung`: how large batches are, and to whom rings are born leased."""
    ours = submitter()
    watched = after_commit.is_watched(db)
    return {
        "ring_holder": ours.worker_id,
        "ring_token": ours.lease_token,
        "ring_seconds": ours.lease_seconds,
        "ring_queues": [queue for queue in set(queues) if watched and ours.accepts(RING + queue)],
        "batches": json.dumps({name: batch_of(handler) for name, handler in handlers().items()}),
    }


def holder_values(db: Db, queue: str) -> dict[str, Any]:
    """To whom a ring for this queue is born leased. No token: to nobody."""
    ours = submitter()
    is_ours = after_commit.is_watched(db) and ours.accepts(RING + queue)
    return {
        "ring_holder": ours.worker_id,
        "ring_token": ours.lease_token if is_ours else None,
        "ring_seconds": ours.lease_seconds,
    }


def publish_after_commit(db: Db, rings: Sequence[Sequence[Any]]) -> None:
    """What `rings` returned: rings that this process must publish when its transaction has committed."""
    if rings:
        token = submitter().lease_token
        after_commit.publish_after_commit(db, [_claimed(ring, token) for ring in rings])


def publish_one_after_commit(
    db: Db, id_: int, queue: str, payload: Mapping[str, Any], *, priority: int, since: datetime
) -> None:
    """A ring that was born leased to this process."""
    token = submitter().lease_token
    ring = ClaimedEvent(id_, RING + queue, payload, None, {"priority": priority}, 0, token, since)
    after_commit.publish_after_commit(db, [ring])


def _claimed(ring: Sequence[Any], token: Any) -> ClaimedEvent:
    id_, destination, payload, headers, created_at = ring
    since = datetime.fromisoformat(created_at)
    no_headers: Mapping[str, Any] = headers or {}
    return ClaimedEvent(id_, destination, payload, None, no_headers, 0, token, since)
