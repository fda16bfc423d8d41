"""Dead letters: what an operator does with DEAD tasks, and the queue that shows them (P23).

    DEAD ──requeue──► QUEUED      attempts start again, the history stays        DEAD ──discard──► DISCARDED

The queue `INGEST_DLQ_QUEUE` is a projection of the DEAD tasks: each puts a message with its id and error code there,
through the outbox. `sync` makes it equal again after a requeue, a discard, or a broker that lost it.
"""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Engine, TextClause, text
from sqlalchemy.orm import Session

import settings
from outbox.lease import connection_of
from tasks import rings

BATCH: Final = 500

_CHOSEN: Final = """status = 'DEAD'
    AND (CAST(:ids AS uuid[]) IS NULL OR id = ANY(CAST(:ids AS uuid[])))
    AND (CAST(:type AS text) IS NULL OR type = :type)
    AND (CAST(:queue AS text) IS NULL OR queue = :queue)
    AND (CAST(:error_code AS text) IS NULL OR error_code = :error_code)
    AND (CAST(:since AS timestamptz) IS NULL OR finished_at >= :since)
    AND (CAST(:until AS timestamptz) IS NULL OR finished_at < :until)"""

COUNT: Final = text(f"""
    SELECT type, error_code, error_message, count(*) FROM ingest_task WHERE {_CHOSEN}
    GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3
""")

_NEXT: Final = f"""
    WITH clock AS MATERIALIZED (SELECT ledger_now() AS at),
    dead AS MATERIALIZED (
        SELECT id FROM ingest_task WHERE {_CHOSEN} AND (finished_at, id) > (:after_at, :after_id)
        ORDER BY finished_at, id LIMIT :batch),
    held AS MATERIALIZED (
        SELECT id, attempt_count, finished_at FROM ingest_task WHERE id IN (SELECT id FROM dead) AND status = 'DEAD'
        ORDER BY id FOR NO KEY UPDATE SKIP LOCKED)"""
_LAST: Final = "(SELECT max(finished_at) FROM held), (SELECT array_agg(id ORDER BY finished_at, id) FROM held)"

# requeue: DEAD → QUEUED, attempts start again, due at once, with its ring.
REQUEUE: Final = text(f"""{_NEXT},
    told AS (
        INSERT INTO ingest_task_transition (task_id, from_status, to_status, attempt_count, message, actor, created_at)
        SELECT id, 'DEAD', 'QUEUED', 0, :reason, :actor, at FROM held CROSS JOIN clock),
    back AS (
        UPDATE ingest_task task
        SET status = 'QUEUED', attempt_count = 0, next_retry_at = NULL, finished_at = NULL, isolated = false,
            rung_at = at, updated_at = at
        FROM held, clock WHERE task.id = held.id
        RETURNING task.id, type, queue, priority, isolated, CAST(NULL AS timestamptz) AS due_at),
    {rings.rung("back")}
    SELECT {_LAST}, ours FROM rings
""")
# discard: DEAD → DISCARDED.
DISCARD: Final = text(f"""{_NEXT},
    told AS (
        INSERT INTO ingest_task_transition (task_id, from_status, to_status, attempt_count, message, actor, created_at)
        SELECT id, 'DEAD', 'DISCARDED', attempt_count, :reason, :actor, at FROM held CROSS JOIN clock),
    gone AS (
        UPDATE ingest_task task SET status = 'DISCARDED', finished_at = at, updated_at = at
        FROM held, clock WHERE task.id = held.id)
    SELECT {_LAST}, '[]'::jsonb
""")

# letters: a dead letter for every DEAD task, page by page.
LETTERS: Final = text("""
    WITH page AS MATERIALIZED (
        SELECT id, finished_at, error_code FROM ingest_task
        WHERE status = 'DEAD' AND (finished_at, id) > (:after_at, :after_id) ORDER BY finished_at, id LIMIT :batch),
    written AS (
        INSERT INTO outbox_event (destination, payload, created_at)
        SELECT :destination, jsonb_build_object('dead', id, 'errorCode', error_code), (SELECT ledger_now()) FROM page)
    SELECT count(*), max(finished_at), (SELECT id FROM page ORDER BY finished_at DESC, id DESC LIMIT 1) FROM page
""")
# forget_letters: those that have not left yet; a new one is written for each.
FORGET_LETTERS: Final = text("""
    DELETE FROM outbox_event
    WHERE destination = :destination AND status IN ('NEW', 'RETRYING') AND ordering_key IS NULL
      AND (lease_until IS NULL OR lease_until <= (SELECT ledger_now()))
""")
DEAD_COUNT: Final = text("SELECT count(*) FROM ingest_task WHERE status = 'DEAD'")
LETTERS_ON_THE_WAY: Final = text("""
    SELECT count(*) FROM outbox_event
    WHERE destination = :destination AND status IN ('NEW', 'RETRYING') AND ordering_key IS NULL
""")
_START: Final = {"after_at": "-infinity", "after_id": uuid.UUID(int=0)}


@dataclass(frozen=True, slots=True)
class Choice:
    """Which DEAD tasks. Nothing given: all."""

    ids: list[uuid.UUID] | None = None
    type: str | None = None
    queue: str | None = None
    error_code: str | None = None
    since: datetime | None = None  # DEAD since
    until: datetime | None = None

    @property
    def is_all(self) -> bool:
        return self == Choice()


@dataclass(frozen=True, slots=True)
class DeadCount:
    """How many of one kind."""

    type: str
    error_code: str | None
    error_message: str | None
    count: int


def count(connection: Connection, choice: Choice) -> list[DeadCount]:
    return [DeadCount(*row) for row in connection.execute(COUNT, dataclasses.asdict(choice))]


def requeue(
    engine: Engine,
    choice: Choice,
    *,
    actor: str,
    reason: str | None = None,
    limit: int | None = None,
    batch: int = BATCH,
) -> Iterator[list[uuid.UUID]]:
    """Yields the ids of each batch that was requeued, after its commit."""
    return _in_batches(
        engine, choice, REQUEUE, limit=limit, batch=batch, values={"actor": actor, "reason": reason or "requeued"}
    )


def discard(
    engine: Engine, choice: Choice, *, actor: str, reason: str | None = None, limit: int | None = None
) -> Iterator[list[uuid.UUID]]:
    """Yields the ids of each batch that was discarded, after its commit."""
    return _in_batches(
        engine, choice, DISCARD, limit=limit, batch=BATCH, values={"actor": actor, "reason": reason or "discarded"}
    )


def sync(
    engine: Engine,
    current: settings.Settings,
    *,
    depths: Callable[[Iterable[str]], dict[str, int]],
    purge: Callable[[str], int],
    force: bool = False,
) -> int:
    """Make the queue equal to the DEAD tasks if their counts differ; returns how many letters were written."""
    queue = current.ingest_dlq_queue
    if not queue:
        return 0
    destination = rings.RING + queue
    with engine.begin() as connection:
        dead = connection.execute(DEAD_COUNT).scalar_one()
        on_the_way = connection.execute(LETTERS_ON_THE_WAY, {"destination": destination}).scalar_one()
    if not force and depths([queue])[queue] + on_the_way == dead:
        return 0
    purge(queue)
    with engine.begin() as connection:
        connection.execute(FORGET_LETTERS, {"destination": destination})
    written, place = 0, dict(_START)
    while True:
        with engine.begin() as connection:
            found, at, last = connection.execute(LETTERS, {**place, "destination": destination, "batch": BATCH}).one()
        written += int(found)
        if found < BATCH:
            return written
        place = {"after_at": at, "after_id": last}


def _in_batches(
    engine: Engine, choice: Choice, statement: TextClause, *, limit: int | None, batch: int, values: dict[str, Any]
) -> Iterator[list[uuid.UUID]]:
    done, place = 0, dict(_START)
    while limit is None or done < limit:
        most = batch if limit is None else min(batch, limit - done)
        with Session(engine) as db:
            given = {**dataclasses.asdict(choice), **values, **place, "batch": most}
            given |= rings.ring_values(db, settings.current().ingest_queues)
            at, ids, ours = connection_of(db).execute(statement, given).one()
            rings.publish_after_commit(db, ours)
            db.commit()
        if not ids:
            return
        done += len(ids)
        place = {"after_at": at, "after_id": ids[-1]}
        yield ids
