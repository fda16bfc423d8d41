"""Reclaim the leases of lost workers.

A lease expires when its holder no longer renews it. Reclaim locks the lease, settles its tasks under its token, and
deletes it, in one transaction. A holder that settles at the same moment either comes first or is refused.

`execution/decision.py` says what becomes of the tasks: one that ran alone has failed, several will each run alone.

After a restart of the database, or when reclaim itself has not run for longer than a lease, an expired lease is first
extended: its holder may be alive and was unable to renew it. This happens once. If the holder has not renewed the lease
by the end of the extension, it is reclaimed. If PostgreSQL restarted while the holder had the lease, its tasks are
released: the holder may have been stopped when it could not write that down. See docs/protocol.md, Poison and Ticks.
"""

from __future__ import annotations

import logging
import operator
import uuid
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Final

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from models.driver_values import array_of_ids
from models.ledger_outage import asks_to_repeat, is_outage
from models.sql import sql
from settings import Settings
from tally.counts import count
from tally.subjects import Subject
from tasks.core.outcomes import Dead, Isolated, Outcome, Released, Retry
from tasks.core.registry import find_or_default, handlers
from tasks.core.task import Task
from tasks.execution.announcements import announce
from tasks.execution.claim import task_from_row
from tasks.execution.claim_statements import LOSSES, RUNNING
from tasks.execution.decision import LOST_IN_RESTART, decide_lost_process
from tasks.execution.limits import wake_waiting
from tasks.execution.settle import write_outcomes

logger = logging.getLogger(__name__)

_LOCK_LEASES: Final = """
    WITH found AS MATERIALIZED (
        SELECT token, sum(cardinality(task_ids)) OVER (ORDER BY lease_until, token) - cardinality(task_ids) AS before
        FROM ledger.task_lease WHERE {0} AND token <> ALL(CAST(:failed AS uuid[])))
    SELECT token, holder, type, reason, is_extended AND claimed_at < pg_postmaster_start_time() AS was_lost_in_restart
    FROM ledger.task_lease
    WHERE token = ANY(ARRAY(SELECT token FROM found WHERE before < :tasks)) AND {0}
    ORDER BY lease_until, token FOR UPDATE SKIP LOCKED"""
# expired: leases that their holders have not renewed, longest expired first, until they have about `:tasks` tasks.
EXPIRED: Final = sql(_LOCK_LEASES.format("lease_until <= (SELECT ledger.ledger_now())"))
# of_holders: the leases of processes that are known to have ended.
OF_HOLDERS: Final = sql(_LOCK_LEASES.format("holder = ANY(CAST(:holders AS text[]))"))
END_LEASES: Final = sql("DELETE FROM ledger.task_lease WHERE token = ANY(CAST(:tokens AS uuid[]))")

# extend_expired: expired, not extended before → valid for one more lease from now, if PostgreSQL has restarted since
# the last renewal, or reclaim was away. Renewing clears the mark. A lease with a reason is left out: its holder was
# killed at the hard limit.
EXTEND_EXPIRED: Final = sql("""
    WITH expired AS MATERIALIZED (
        SELECT token FROM ledger.task_lease
        WHERE lease_until <= (SELECT ledger.ledger_now()) AND NOT is_extended AND reason IS NULL
          AND (:was_away OR lease_until - make_interval(secs => :lease_seconds) <= pg_postmaster_start_time())
        ORDER BY token FOR UPDATE SKIP LOCKED)
    UPDATE ledger.task_lease
    SET lease_until = (SELECT ledger.ledger_now()) + make_interval(secs => :lease_seconds), is_extended = true
    FROM expired WHERE task_lease.token = expired.token
""")
# was_away: reclaim has not run for a while, so that holders may have been unable to renew their leases.
WAS_AWAY: Final = sql("""
    SELECT coalesce((SELECT (SELECT ledger.ledger_now()) - finished_at > make_interval(secs => :pause_seconds)
                     FROM ledger.tick WHERE name = 'reclaim'), true)
""")


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """How many leases were ended, and how many of their tasks were charged with an attempt, isolated or released."""

    leases: int = 0
    charged: int = 0
    isolated: int = 0
    released: int = 0

    def __add__(self, other: Reclaimed) -> Reclaimed:
        return Reclaimed(*map(operator.add, astuple(self), astuple(other)))


def reclaim_leases(engine: Engine, settings: Settings, *, holders: Sequence[str] | None = None) -> Reclaimed:
    """Reclaim all expired leases, or those of `holders`, some in each transaction."""
    if holders is None:
        _extend_if_interrupted(engine, settings)
    total = Reclaimed()
    failed: list[uuid.UUID] = []
    while True:
        with Session(engine) as db:
            some, settled, failed_now = _reclaim_some(db, settings, holders, failed)
            db.commit()
        announce(settled, settled)
        if not some.leases and not failed_now:
            return total
        failed += failed_now
        total += some
        count(Subject.LEASE, "expired", some.leases)
        count(Subject.RECLAIM, "claimed", some.charged + some.isolated + some.released)
        count(Subject.RECLAIM, "error", len(failed_now))


def _extend_if_interrupted(engine: Engine, settings: Settings) -> None:
    lease = settings.ingest_lease_seconds
    pause = max(lease, 2 * settings.ingest_reclaim_interval_ms / 1000)
    with engine.begin() as connection:
        was_away = connection.execute(WAS_AWAY, {"pause_seconds": pause}).scalar_one()
        connection.execute(EXTEND_EXPIRED, {"lease_seconds": lease, "was_away": was_away})


def _reclaim_some(
    db: Session, settings: Settings, holders: Sequence[str] | None, failed: Sequence[uuid.UUID]
) -> tuple[Reclaimed, dict[Task, Outcome], list[uuid.UUID]]:
    """Reclaim leases with about a batch of tasks; return also their outcomes and the leases that failed."""
    statement = EXPIRED if holders is None else OF_HOLDERS
    values = {"tasks": settings.ingest_reclaim_batch_size, "holders": list(holders or ()), "failed": list(failed)}
    leases = db.execute(statement, values).all()
    if not leases:
        return Reclaimed(), {}, []
    running: dict[uuid.UUID, list[Task]] = {lease.token: [] for lease in leases}
    for token, *row in db.execute(RUNNING, {"tokens": list(running)}):
        running[token].append(task_from_row(row))
    ended: list[uuid.UUID] = []
    total = Reclaimed()
    all_settled: dict[Task, Outcome] = {}
    for lease in leases:
        tasks = running[lease.token]
        losses = _losses_in_restarts(db, tasks) if lease.was_lost_in_restart else None
        handler = find_or_default(lease.type)
        may_be_async = handler.is_async or lease.type not in handlers()
        outcomes = decide_lost_process(
            tasks, lease.holder, lease.reason, losses_in_restarts=losses, may_be_async=may_be_async
        )
        try:
            with db.begin_nested():
                settled = write_outcomes(db, outcomes, token=lease.token, handler=handler)
        except DBAPIError as error:  # such as unusable retry settings of the handler: other leases must not wait for it
            if is_outage(error) or asks_to_repeat(error):
                raise
            fields = {"event": "lease_not_reclaimed", "type": lease.type, "taskIds": [str(task.id) for task in tasks]}
            logger.exception("Cannot reclaim a lease of %s.", lease.type, extra=fields)
            continue
        ended.append(lease.token)
        all_settled |= settled
        kinds = [type(outcome) for outcome in settled.values()]
        charged = kinds.count(Retry) + kinds.count(Dead)
        total += Reclaimed(1, charged, kinds.count(Isolated), kinds.count(Released))
    wake_waiting(db, [task.id for token in ended for task in running[token]])  # all limits at once, in one order
    db.execute(END_LEASES, {"tokens": ended})
    return total, all_settled, [token for token in running if token not in ended]


def _losses_in_restarts(db: Session, tasks: Sequence[Task]) -> int:
    """Return how often in a row one of these tasks was lost while PostgreSQL restarted, before this time."""
    values = {"ids": array_of_ids(task.id for task in tasks), "message": LOST_IN_RESTART}
    return int(db.execute(LOSSES, values).scalar_one())
