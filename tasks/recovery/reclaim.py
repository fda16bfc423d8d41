"""Reclaim: tasks that were lost with their worker, and tasks whose wake-up was lost on the way.

A lease that ran out is taken over under its own token, while its row is locked: a holder that still settles at this
moment comes first or is refused. A task that was alone in it is charged with a failure; several are isolated instead,
since nobody knows whose fault it was (P5). After a restart of the database, or when nobody has looked for longer than a
lease, leases that ran out are first given one more, so that heartbeats come before us (P24).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Engine
from sqlalchemy.exc import DataError
from sqlalchemy.orm import Session

import metrics
from models.sql import sql
from settings import Settings
from tasks.core.outcomes import ErrorCode, Failure, Retry
from tasks.core.registry import find_or_default
from tasks.core.task import Task
from tasks.execution.claim import task_of
from tasks.execution.release import RUNNING
from tasks.execution.settle import Settlement

logger = logging.getLogger(__name__)

# expired: leases that ran out, the oldest first, skipping those that another reclaim has.
EXPIRED: Final = sql("""
    SELECT token, holder, type FROM ledger.task_lease
    WHERE lease_until <= (SELECT ledger.ledger_now()) ORDER BY lease_until LIMIT :leases FOR UPDATE SKIP LOCKED
""")
# of_holders: the leases of processes that are known to be gone.
OF_HOLDERS: Final = sql("""
    SELECT token, holder, type FROM ledger.task_lease
    WHERE holder = ANY(CAST(:holders AS text[])) ORDER BY token LIMIT :leases FOR UPDATE SKIP LOCKED
""")
END_LEASES: Final = sql("DELETE FROM ledger.task_lease WHERE token = ANY(CAST(:tokens AS uuid[]))")

# give_time: whoever was kept from renewing gets one lease more.
GIVE_TIME: Final = sql("""
    WITH late AS MATERIALIZED (
        SELECT token FROM ledger.task_lease WHERE lease_until <= (SELECT ledger.ledger_now()) ORDER BY token FOR UPDATE SKIP LOCKED)
    UPDATE ledger.task_lease SET lease_until = (SELECT ledger.ledger_now()) + make_interval(secs => :lease_seconds)
    FROM late WHERE task_lease.token = late.token
""")
# was_away: the database has just started, or nobody has looked for longer than a lease, and than two looks are apart.
WAS_AWAY: Final = sql("""
    SELECT (SELECT ledger.ledger_now()) - pg_postmaster_start_time() < make_interval(secs => :lease_seconds)
        OR coalesce((SELECT (SELECT ledger.ledger_now()) - finished_at > make_interval(secs => :away_seconds)
                     FROM ledger.tick WHERE name = 'reclaim'), true)
""")
LEASES_AT_ONCE: Final = 100


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What one look found."""

    leases: int = 0
    charged: int = 0
    isolated: int = 0


def take_over(engine: Engine, settings: Settings, *, holders: Sequence[str] | None = None) -> Reclaimed:
    """Take over leases that ran out, or those of holders that are gone; some in each transaction."""
    found = Reclaimed()
    lease = {"lease_seconds": settings.ingest_lease_seconds}
    with engine.begin() as connection:
        away = max(settings.ingest_lease_seconds, 2 * settings.ingest_reclaim_interval_ms / 1000)
        if holders is None and connection.execute(WAS_AWAY, {**lease, "away_seconds": away}).scalar_one():
            connection.execute(GIVE_TIME, lease)
    while True:
        with Session(engine) as db:
            batch = _take_over_some(db, settings, holders)
            db.commit()
        found = Reclaimed(found.leases + batch.leases, found.charged + batch.charged, found.isolated + batch.isolated)
        metrics.LEASE_EXPIRED_TOTAL.inc(batch.leases)
        metrics.INGEST_STREAM_RECLAIM_TOTAL.labels("claimed").inc(batch.charged + batch.isolated)
        if batch.leases < LEASES_AT_ONCE:
            return found


def _take_over_some(db: Session, settings: Settings, holders: Sequence[str] | None) -> Reclaimed:
    statement = EXPIRED if holders is None else OF_HOLDERS
    leases = db.execute(statement, {"leases": LEASES_AT_ONCE, "holders": list(holders or ())}).all()
    if not leases:
        return Reclaimed()
    tokens = [lease.token for lease in leases]
    running: dict[uuid.UUID, list[Task]] = {token: [] for token in tokens}
    for token, *found in db.execute(RUNNING, {"tokens": tokens}):
        running[token].append(task_of(found))
    ended: list[uuid.UUID] = []
    charged = isolated = 0
    for lease in leases:
        tasks = running[lease.token]
        settlement = Settlement(lease.token, find_or_default(lease.type), settings)
        try:
            with db.begin_nested():
                if len(tasks) == 1:
                    charged += len(settlement.settle(db, [(tasks[0], Retry(_lost(lease.holder)))]))
                elif tasks:
                    isolated += len(settlement.isolate(db, tasks, f"the worker {lease.holder} was lost with its batch"))
        except DataError:  # of what its handler asks for; the others are not to wait for that
            logger.exception("a lease of %s cannot be taken over", lease.type)
        else:
            ended.append(lease.token)
    db.execute(END_LEASES, {"tokens": ended})
    return Reclaimed(len(ended), charged, isolated)


def _lost(holder: str) -> Failure:
    sentence = f"The worker {holder} was lost while it ran this task."
    return Failure(ErrorCode.WORKER_LOST, sentence, sentence)
