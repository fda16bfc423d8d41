"""Rebuilding the broker: after a flush, or with a new one, wake-up for everything that is due.

The ledger is the truth, so a rebuild only reads it and wake-ups. It is safe at any time, with workers running too: a wake-up
is a hint, and a task that was woken twice is run once. What somebody else is just working on is left out, and so is what
changed or became due after the start: that has a wake-up of its own, and a stream of new tasks would never end.
"""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from models.clock import now
from models.sql import sql
from outbox.lease import connection_of
from tasks.core import wakeups
from tasks.core.due import DUE_AT, KINDS, OPEN, TIME
from tasks.core.registry import DEFAULT_BATCH, handlers

PAGE: Final = 1000
# Also tasks with a partition key, which lie behind all others; the guard knows whose turn it is.
_DUE: Final = f"({DUE_AT} <= :until OR {DUE_AT} = 'infinity') AND {TIME} <= :until"

DUE_KINDS: Final = sql(f"""
    WITH RECURSIVE {KINDS}
    SELECT queue, type FROM kind
    WHERE EXISTS (SELECT FROM ledger.ingest_task task WHERE task.queue = kind.queue AND task.type = kind.type
                  AND {OPEN} AND {_DUE})
""")
DUE_COUNT: Final = sql(f"""
    SELECT count(*) FROM ledger.ingest_task WHERE queue = :queue AND type = :type AND {OPEN} AND {_DUE}
""")
# wake_page: a new wake-up for every task of a page that still waits; due tasks of one kind, the longest due first.
WAKE_PAGE: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    page AS MATERIALIZED (
        SELECT id, {DUE_AT} AS due FROM ledger.ingest_task
        WHERE queue = :queue AND type = :type AND {OPEN} AND {_DUE} AND updated_at <= :until
          AND ({DUE_AT}, id) > (:due, :id)
        ORDER BY {DUE_AT}, id LIMIT :page),
    held AS MATERIALIZED (
        SELECT id FROM ledger.ingest_task WHERE id IN (SELECT id FROM page) AND {OPEN}
        ORDER BY id FOR NO KEY UPDATE SKIP LOCKED),
    waiting AS (
        UPDATE ledger.ingest_task task SET last_wakeup_at = at FROM held, clock WHERE task.id = held.id
        RETURNING task.id, type, queue, priority, isolated, CAST(NULL AS timestamptz) AS due_at),
    {wakeups.wake("waiting")}
    SELECT CAST((SELECT due FROM page ORDER BY due DESC, id DESC LIMIT 1) AS text),
           (SELECT id FROM page ORDER BY due DESC, id DESC LIMIT 1),
           (SELECT count(*) FROM waiting), (SELECT count(*) FROM woken), ours FROM wakeups
""")


@dataclass(frozen=True, slots=True)
class DueKind:
    """Tasks of one kind that are due."""

    queue: str
    type: str
    count: int


@dataclass(frozen=True, slots=True)
class Woken:
    """For how many tasks, in how many wake-ups."""

    tasks: int = 0
    wakeups: int = 0


def due(connection: Connection) -> list[DueKind]:
    """How much would be woken."""
    until = now(connection)
    found = []
    for queue, type_ in connection.execute(DUE_KINDS, {"until": until}).all():
        values = {"queue": queue, "type": type_, "until": until}
        found.append(DueKind(queue, type_, connection.execute(DUE_COUNT, values).scalar_one()))
    return found


def wake_all_due(engine: Engine) -> Iterator[Woken]:
    """Yields what was woken so far, after each page."""
    with engine.connect() as connection:
        until = now(connection)
        kinds = connection.execute(DUE_KINDS, {"until": until}).all()
    so_far = Woken()
    for queue, type_ in kinds:
        for page in _wake_kind(engine, queue, type_, until):
            so_far = Woken(so_far.tasks + page.tasks, so_far.wakeups + page.wakeups)
            yield so_far


def _wake_kind(engine: Engine, queue: str, type_: str, until: datetime) -> Iterator[Woken]:
    batch = handlers()[type_].batch if type_ in handlers() else DEFAULT_BATCH
    page = max(batch, PAGE // batch * batch)  # so that only the last wake-up is not full
    due, last = "-infinity", uuid.UUID(int=0)
    while True:
        with Session(engine) as db:
            values = {"queue": queue, "type": type_, "until": until, "due": due, "id": last, "page": page}
            values |= wakeups.wakeup_values(db, [queue])
            due, last, tasks, woken, ours = connection_of(db).execute(WAKE_PAGE, values).one()
            wakeups.publish_after_commit(db, ours)
            db.commit()
        if last is None:
            return
        yield Woken(tasks, woken)
