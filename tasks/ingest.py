"""`tasks.ingest(ids)`: what a worker does with one message.

    guard ─► batch of one kind ─► handler, settle ─► what is left of the ids, until nothing is

The message may be a duplicate, late, or made by hand: the guard decides. It is acknowledged when everything in it is
settled or refused; if this process dies before, the broker or reclaim brings the tasks back.
"""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import settings
from failpoint import failpoint
from outbox.lease import connection_of
from tasks import guard, rings
from tasks.actor import actor
from tasks.batch import Batch
from tasks.counting import count
from tasks.registry import find, handlers

Owned = Callable[[Sequence[uuid.UUID]], None]
RING_AGAIN_SECONDS: Final = 30.0

# ring_later: for tasks that nobody here can run; no attempt, no transition (P7).
RING_LATER: Final = text(f"""
    WITH clock AS MATERIALIZED (SELECT ledger_now() AS at),
    held AS MATERIALIZED (
        SELECT id FROM ingest_task WHERE id = ANY(CAST(:ids AS uuid[])) AND status IN ('QUEUED', 'RETRYING')
        ORDER BY id FOR NO KEY UPDATE SKIP LOCKED),
    waiting AS (
        UPDATE ingest_task task SET rung_at = at + make_interval(secs => :seconds) FROM held, clock
        WHERE task.id = held.id
        RETURNING task.id, type, queue, priority, isolated, rung_at AS due_at),
    {rings.rung("waiting")}
    SELECT ours FROM rings
""")


def ingest(engine: Engine, ids: Sequence[Any], *, owned: Owned | None = None) -> None:
    """Run what may run of these tasks. `owned` is told after each claim what is left to claim: the ledger owns the
    rest from there, durably, and whoever delivered the ids may forget those.
    """
    current = settings.current()
    wanted = uuids(ids)
    while wanted:
        with engine.connect() as connection:
            claim = guard.claim(
                connection,
                wanted,
                handlers=handlers(),
                holder=actor(),
                lease_seconds=current.ingest_lease_seconds,
                durable=owned is not None,
            )
        failpoint("ingest.after_claim")
        count("skipped", len(claim.skipped))
        count("not_due", len(claim.not_due))
        if claim.unhandled:
            _ring_later(engine, claim.unhandled)
        if owned:
            owned(claim.left)
        if claim.tasks:
            Batch(engine, claim, find(claim.tasks[0].type), current).run()
        wanted = claim.left


def _ring_later(engine: Engine, ids: Sequence[uuid.UUID]) -> None:
    """A rolling deploy: another worker may know their type, or this one tomorrow."""
    with Session(engine) as db:
        values = {"ids": list(ids), "seconds": RING_AGAIN_SECONDS, **rings.ring_values(db, ())}
        connection_of(db).execute(RING_LATER, values)
        db.commit()


def uuids(ids: Sequence[Any]) -> list[uuid.UUID]:
    """What is no id is nobody's task."""
    found = []
    for given in ids:
        try:
            found.append(uuid.UUID(str(given)))
        except ValueError:
            count("skipped", 1)
    return found
