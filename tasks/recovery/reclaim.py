"""Reclaim the leases of lost workers.

A lease expires when its holder no longer renews it. Reclaim ends it while its row is locked, and settles its tasks
under its token: a holder that settles at the same moment either comes first or is refused.

    one task was running     → RETRYING or DEAD, error code `worker_lost`: this counts as an attempt
    several were running     → RETRYING, isolated: each runs alone next time, because the culprit is unknown; this does
                               not count as an attempt

After a restart of the database, or when reclaim has not run for longer than a lease, expired leases are first extended
once: their holders may be alive and were unable to renew them. See docs/protocol.md, Poison and Ticks.
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
from tasks.core.outcomes import ErrorCode, Failure, Isolated, Retry
from tasks.core.registry import find_or_default
from tasks.core.task import Task
from tasks.execution.claim import task_of
from tasks.execution.release import RUNNING
from tasks.execution.settle import Outcomes, Settlement

logger = logging.getLogger(__name__)

_LOCK_LEASES: Final = """
    SELECT token, holder, type FROM ledger.task_lease
    WHERE {} ORDER BY lease_until LIMIT :leases FOR UPDATE SKIP LOCKED"""
# expired: leases that their holders have not renewed, longest expired first.
EXPIRED: Final = sql(_LOCK_LEASES.format("lease_until <= (SELECT ledger.ledger_now())"))
# of_holders: the leases of processes that are known to have ended.
OF_HOLDERS: Final = sql(_LOCK_LEASES.format("holder = ANY(CAST(:holders AS text[]))"))
END_LEASES: Final = sql("DELETE FROM ledger.task_lease WHERE token = ANY(CAST(:tokens AS uuid[]))")

# extend_expired: expired leases → valid for one more lease from now.
EXTEND_EXPIRED: Final = sql("""
    WITH expired AS MATERIALIZED (
        SELECT token FROM ledger.task_lease
        WHERE lease_until <= (SELECT ledger.ledger_now()) ORDER BY token FOR UPDATE SKIP LOCKED)
    UPDATE ledger.task_lease SET lease_until = (SELECT ledger.ledger_now()) + make_interval(secs => :lease_seconds)
    FROM expired WHERE task_lease.token = expired.token
""")
# was_interrupted: the database has just started, or reclaim has not run for a while: holders may have been cut off.
WAS_INTERRUPTED: Final = sql("""
    SELECT (SELECT ledger.ledger_now()) - pg_postmaster_start_time() < make_interval(secs => :lease_seconds)
        OR coalesce((SELECT (SELECT ledger.ledger_now()) - finished_at > make_interval(secs => :pause_seconds)
                     FROM ledger.tick WHERE name = 'reclaim'), true)
""")
LEASES_AT_ONCE: Final = 100


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """How many leases were ended, and how many of their tasks were charged with an attempt or isolated."""

    leases: int = 0
    charged: int = 0
    isolated: int = 0

    def __add__(self, other: Reclaimed) -> Reclaimed:
        return Reclaimed(self.leases + other.leases, self.charged + other.charged, self.isolated + other.isolated)


def reclaim_leases(engine: Engine, settings: Settings, *, holders: Sequence[str] | None = None) -> Reclaimed:
    """Reclaim all expired leases, or those of `holders`, some in each transaction."""
    if holders is None:
        _extend_if_interrupted(engine, settings)
    total = Reclaimed()
    while True:
        with Session(engine) as db:
            some = _reclaim_some(db, settings, holders)
            db.commit()
        total += some
        metrics.LEASE_EXPIRED_TOTAL.inc(some.leases)
        metrics.INGEST_STREAM_RECLAIM_TOTAL.labels("claimed").inc(some.charged + some.isolated)
        if some.leases < LEASES_AT_ONCE:
            return total


def _extend_if_interrupted(engine: Engine, settings: Settings) -> None:
    lease = settings.ingest_lease_seconds
    pause = max(lease, 2 * settings.ingest_reclaim_interval_ms / 1000)
    with engine.begin() as connection:
        if connection.execute(WAS_INTERRUPTED, {"lease_seconds": lease, "pause_seconds": pause}).scalar_one():
            connection.execute(EXTEND_EXPIRED, {"lease_seconds": lease})


def _reclaim_some(db: Session, settings: Settings, holders: Sequence[str] | None) -> Reclaimed:
    statement = EXPIRED if holders is None else OF_HOLDERS
    leases = db.execute(statement, {"leases": LEASES_AT_ONCE, "holders": list(holders or ())}).all()
    if not leases:
        return Reclaimed()
    running: dict[uuid.UUID, list[Task]] = {lease.token: [] for lease in leases}
    for token, *found in db.execute(RUNNING, {"tokens": list(running)}):
        running[token].append(task_of(found))
    ended: list[uuid.UUID] = []
    charged = isolated = 0
    for lease in leases:
        tasks = running[lease.token]
        try:
            with db.begin_nested():
                settlement = Settlement(lease.token, find_or_default(lease.type), settings)
                settled = len(settlement.settle(db, _outcomes(tasks, lease.holder)))
        except DataError:  # the handler's retry settings are unusable; other leases must not wait for that
            logger.exception("Cannot reclaim a lease of %s.", lease.type)
            continue
        ended.append(lease.token)
        if len(tasks) == 1:
            charged += settled
        else:
            isolated += settled
    db.execute(END_LEASES, {"tokens": ended})
    return Reclaimed(len(ended), charged, isolated)


def _outcomes(tasks: Sequence[Task], holder: str) -> Outcomes:
    if len(tasks) == 1:
        sentence = f"The worker {holder} was lost while it ran this task."
        return [(tasks[0], Retry(Failure(ErrorCode.WORKER_LOST, sentence, sentence)))]
    return [(task, Isolated(f"the worker {holder} was lost with its batch")) for task in tasks]
