"""Keep the dead-letter queue equal to the DEAD tasks (docs/protocol.md, The dead-letter queue).

A task that dies puts a message (a dead letter: its id and error code) into `INGEST_DLQ_QUEUE`, through the outbox.
`sync` writes the queue again when it differs: after a requeue, a discard, or the loss of the broker's content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Engine

import settings
from models.sql import sql
from outbox.dead_rows import BATCH
from outbox.destinations import CELERY
from tasks import broker
from tasks.core.holders import actor as this_process
from tasks.operations.dead_tasks import LAST, PAGE, start
from tasks.recovery.tick_rows import single_flight

SYNC: Final = "dead_letters"  # only one process at a time may run the sync of this name
SYNC_SECONDS: Final = 60.0  # a process that takes longer is presumed lost, and another may start

_UNSENT: Final = "destination = :destination AND status IN ('NEW', 'RETRYING') AND ordering_key IS NULL"
_REFUSED: Final = "destination = :destination AND status = 'DEAD' AND ordering_key IS NULL"
# count: count the DEAD tasks, the letters that are unsent or were refused, and those certainly not in the queue yet.
COUNT: Final = sql(f"""
    SELECT (SELECT count(*) FROM ledger.ingest_task WHERE status = 'DEAD'),
           count(*) + (SELECT count(*) FROM ledger.outbox_event WHERE {_REFUSED}),
           count(*) FILTER (WHERE lease_until IS NULL)
    FROM ledger.outbox_event WHERE {_UNSENT}
""")
# forget_letters: delete unpublished letters, except those that a publisher holds under a lease; return their tasks.
FORGET_LETTERS: Final = sql(f"""
    WITH refused AS (DELETE FROM ledger.outbox_event WHERE {_REFUSED} RETURNING payload),
    unsent AS (
        DELETE FROM ledger.outbox_event
        WHERE {_UNSENT} AND (lease_until IS NULL OR lease_until <= (SELECT ledger.ledger_now())) RETURNING payload)
    SELECT payload ->> 'dead' FROM refused UNION ALL SELECT payload ->> 'dead' FROM unsent
""")
# leaving: the tasks whose letter is still unsent.
LEAVING: Final = sql(f"SELECT payload ->> 'dead' FROM ledger.outbox_event WHERE {_UNSENT}")
# letters: write a letter for each task of the page that has none on its way. `again`: it is not counted once more.
LETTERS: Final = sql(f"""
    WITH page AS MATERIALIZED (
        SELECT id, finished_at, error_code FROM ledger.ingest_task WHERE status = 'DEAD' AND {PAGE}),
    written AS (
        INSERT INTO ledger.outbox_event (destination, payload, created_at)
        SELECT :destination, jsonb_build_object('dead', id, 'errorCode', error_code, 'again',
                                                CAST(id AS text) <> ALL(CAST(:unsent AS text[]))),
               (SELECT ledger.ledger_now())
        FROM page WHERE CAST(id AS text) <> ALL(CAST(:leaving AS text[])) RETURNING id)
    SELECT (SELECT finished_at FROM page {LAST}) AS after_at, (SELECT id FROM page {LAST}) AS after_id,
           (SELECT count(*) FROM written) AS letters
""")


def sync(engine: Engine, current: settings.Settings, *, force: bool = False) -> int:
    """Make the queue equal to the DEAD tasks if their counts differ; return the number of letters written.

    Only one process writes at a time. Counts can be off while tasks die and letters are published; the next call
    corrects them. `force` writes the queue even if the counts agree.
    """
    queue = current.ingest_dlq_queue
    if not queue or (difference(engine, current) is None and not force):
        return 0
    with single_flight(engine, SYNC, holder=this_process(), seconds=SYNC_SECONDS) as ours:
        return _rewrite(engine, queue, CELERY + queue) if ours else 0


def difference(engine: Engine, current: settings.Settings) -> tuple[int, int] | None:
    """Return the number of letters in the queue and of DEAD tasks, or None if they may be equal.

    An unreachable broker is an error, also for `sync` with `force`: it must not delete anything then.
    """
    queue = current.ingest_dlq_queue
    if not queue:
        return None
    before = _count(engine, CELERY + queue)
    waiting = broker.depths([queue])[queue]
    after = _count(engine, CELERY + queue)
    return None if _may_be_equal(waiting, before, after) else (waiting, after.dead)


@dataclass(frozen=True, slots=True)
class _Counts:
    dead: int
    unsent: int
    unleased: int


def _count(engine: Engine, destination: str) -> _Counts:
    with engine.begin() as connection:
        return _Counts(*connection.execute(COUNT, {"destination": destination}).one())


def _may_be_equal(waiting: int, before: _Counts, after: _Counts) -> bool:
    """Return whether the queue may have been equal to the DEAD tasks at some moment between the two counts.

    A leased letter may already be in the queue, and a letter published between the two counts is counted twice. A
    letter that the broker refused counts as sent: writing it again at every call would add one more each time.
    """
    least = waiting + min(before.unleased, after.unleased)
    most = waiting + max(before.unsent, after.unsent)
    return least <= max(before.dead, after.dead) and most >= min(before.dead, after.dead)


def _rewrite(engine: Engine, queue: str, destination: str) -> int:
    with engine.begin() as connection:
        unsent, leaving = (
            [name or "" for name in connection.execute(statement, {"destination": destination}).scalars()]
            for statement in (FORGET_LETTERS, LEAVING)
        )
        values = {"destination": destination, "leaving": leaving, "unsent": unsent, "batch": BATCH, **start(connection)}
    broker.purge(queue)
    written = 0
    while values["after_at"] is not None:
        with engine.begin() as connection:
            values |= connection.execute(LETTERS, values).mappings().one()
        written += values["letters"]
    return written
