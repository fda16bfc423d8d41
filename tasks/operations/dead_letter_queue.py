"""The dead-letter queue is a projection of the DEAD tasks (P23).

Each DEAD task puts a message with its id and error code into `INGEST_DLQ_QUEUE`, through the outbox. `sync` makes the
queue equal to the DEAD tasks again after a requeue, a discard, or a broker that lost it.
"""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Engine

import settings
from models.clock import now
from models.sql import sql
from tasks.core import wakeups
from tasks.core.holders import actor as this_process
from tasks.operations.dead_tasks import BATCH, LAST, PAGE, START
from tasks.recovery.tick_rows import single_flight

SYNC: Final = "dead_letters"  # the name of its single flight
SYNC_SECONDS: Final = 60.0  # after that, one that was lost with its process may be run by another

_UNSENT: Final = "destination = :destination AND status IN ('NEW', 'RETRYING') AND ordering_key IS NULL"
_REFUSED: Final = "destination = :destination AND status = 'DEAD' AND ordering_key IS NULL"
# look: DEAD tasks; letters that have not left, or were refused; and those that are certainly not in the queue yet.
LOOK: Final = sql(f"""
    SELECT (SELECT count(*) FROM ledger.ingest_task WHERE status = 'DEAD'),
           count(*) + (SELECT count(*) FROM ledger.outbox_event WHERE {_REFUSED}), count(*) FILTER (WHERE lease_until IS NULL)
    FROM ledger.outbox_event WHERE {_UNSENT}
""")
# forget_letters: those that are not just leaving; a new one is written for each.
FORGET_LETTERS: Final = sql(f"""
    WITH refused AS (DELETE FROM ledger.outbox_event WHERE {_REFUSED})
    DELETE FROM ledger.outbox_event WHERE {_UNSENT} AND (lease_until IS NULL OR lease_until <= (SELECT ledger.ledger_now()))
""")
LEAVING: Final = sql(f"SELECT payload ->> 'dead' FROM ledger.outbox_event WHERE {_UNSENT}")
# letters: a dead letter for every task that was DEAD by then and has none on its way, page by page.
LETTERS: Final = sql(f"""
    WITH page AS MATERIALIZED (
        SELECT id, finished_at, error_code FROM ledger.ingest_task WHERE status = 'DEAD' AND {PAGE}),
    written AS (
        INSERT INTO ledger.outbox_event (destination, payload, created_at)
        SELECT :destination, jsonb_build_object('dead', id, 'errorCode', error_code), (SELECT ledger.ledger_now()) FROM page
        WHERE CAST(id AS text) <> ALL(CAST(:leaving AS text[])) RETURNING id)
    SELECT (SELECT finished_at FROM page {LAST}), (SELECT id FROM page {LAST}), (SELECT count(*) FROM written)
""")


def sync(
    engine: Engine,
    current: settings.Settings,
    *,
    depths: Callable[[Iterable[str]], dict[str, int]],
    purge: Callable[[str], int],
    force: bool = False,
) -> int:
    """Make the queue equal to the DEAD tasks if their counts differ; returns how many letters were written.

    One at a time; what is counted wrongly because tasks die and letters leave meanwhile is right at the next look.
    """
    queue = current.ingest_dlq_queue
    if not queue:
        return 0
    destination = wakeups.WAKEUP + queue
    before = _look(engine, destination)
    waiting = depths([queue])[queue]  # also with force: nothing is forgotten while the broker is away
    if not force and _may_be_equal(waiting, before, _look(engine, destination)):
        return 0
    with single_flight(engine, SYNC, holder=this_process(), seconds=SYNC_SECONDS) as ours:
        return _write_anew(engine, queue, purge) if ours else 0


@dataclass(frozen=True, slots=True)
class _Look:
    dead: int
    unsent: int
    unleased: int


def _look(engine: Engine, destination: str) -> _Look:
    with engine.begin() as connection:
        return _Look(*connection.execute(LOOK, {"destination": destination}).one())


def _may_be_equal(waiting: int, before: _Look, after: _Look) -> bool:
    """Whether some moment between the two looks may have found the queue equal to the DEAD tasks.

    A letter that is leased may be in the queue already, and one that left between the looks is counted at both ends. A
    letter that was refused is an operator's affair: written anew with every look, there would be more and more of them.
    """
    least = waiting + min(before.unleased, after.unleased)
    most = waiting + max(before.unsent, after.unsent)
    return least <= max(before.dead, after.dead) and most >= min(before.dead, after.dead)


def _write_anew(engine: Engine, queue: str, purge: Callable[[str], int]) -> int:
    destination = wakeups.WAKEUP + queue
    with engine.begin() as connection:
        connection.execute(FORGET_LETTERS, {"destination": destination})
        values = {
            "destination": destination,
            "batch": BATCH,
            "no_later": now(connection),
            "leaving": [name or "" for name in connection.execute(LEAVING, {"destination": destination}).scalars()],
        }
    purge(queue)
    written, place = 0, START
    while place["after_at"] is not None:
        with engine.begin() as connection:
            at, last, letters = connection.execute(LETTERS, {**values, **place}).one()
        written += int(letters)
        place = {"after_at": at, "after_id": last}
    return written
