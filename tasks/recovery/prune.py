"""Pruning: tasks whose retention is over go away with their history, in small batches, each its own short transaction.

SUCCEEDED and DISCARDED have one retention, DEAD another, which is "for ever" unless somebody says otherwise (P1). A
task that had a key leaves a tombstone: whoever submits the key again meets it (P10). Stones go by their own age.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Engine, TextClause

from models.sql import sql
from settings import Settings
from tasks.core import partition_keys, wakeups
from tasks.core.registry import handlers

BATCH: Final = 500


def _pruning(statuses: str, then: str = "") -> TextClause:
    return sql(f"""
        WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
        old AS MATERIALIZED (
            SELECT id FROM ledger.ingest_task
            WHERE status IN ({statuses}) AND finished_at < (SELECT at FROM clock) - make_interval(hours => :hours)
            ORDER BY finished_at LIMIT :batch FOR UPDATE SKIP LOCKED),
        gone AS (
            DELETE FROM ledger.ingest_task task USING old WHERE task.id = old.id
            RETURNING task.id, task.status, task.payload, task.idempotency_key, task.partition_key),
        stones AS (
            INSERT INTO ledger.task_tombstone (id, status, payload_sha, created_at)
            SELECT id, status, ledger.ingest_payload_sha(payload), (SELECT at FROM clock) FROM gone
            WHERE idempotency_key IS NOT NULL ON CONFLICT (id) DO NOTHING),
        transitions AS (DELETE FROM ledger.ingest_task_transition t USING old WHERE t.task_id = old.id),
        audits AS (DELETE FROM ledger.task_audit a USING old WHERE a.task_id = old.id),
        steps AS (DELETE FROM ledger.task_step s USING old WHERE s.task_id = old.id)
        {then}
        SELECT count(*) FROM gone
    """)  # noqa: S608 - literals of this file


# prune: final longer ago than its retention → gone, the oldest first.
PRUNE_DONE: Final = _pruning("'SUCCEEDED', 'DISCARDED'")
PRUNE_DEAD: Final = _pruning(
    "'DEAD'", f",{partition_keys.freed('gone')}, {wakeups.wake('freed')}"
)  # it has held its key (P9)
PRUNE_STONES: Final = sql("""
    WITH old AS MATERIALIZED (
        SELECT id FROM ledger.task_tombstone
        WHERE created_at < (SELECT ledger.ledger_now()) - make_interval(hours => :hours) LIMIT :batch FOR UPDATE SKIP LOCKED),
    gone AS (DELETE FROM ledger.task_tombstone t USING old WHERE t.id = old.id RETURNING t.id)
    SELECT count(*) FROM gone
""")


@dataclass(frozen=True, slots=True)
class Pruned:
    """How much went."""

    tasks: int
    tombstones: int


def prune(engine: Engine, settings: Settings, *, budget_seconds: float = 5.0) -> Pruned:
    """Until nothing is old enough or the time is over."""
    deadline = time.monotonic() + budget_seconds
    tasks = _all(engine, PRUNE_DONE, settings.ingest_succeeded_retention_hours, deadline)
    if settings.ingest_dead_retention_hours:
        tasks += _all(engine, PRUNE_DEAD, settings.ingest_dead_retention_hours, deadline)
    return Pruned(tasks, _all(engine, PRUNE_STONES, settings.ingest_tombstone_retention_hours, deadline))


def _all(engine: Engine, statement: TextClause, hours: int, deadline: float) -> int:
    done, last = 0, BATCH
    while last == BATCH and time.monotonic() < deadline:
        with engine.begin() as connection:
            values = {"hours": hours, "batch": BATCH, "skipping": partition_keys.skipping(handlers())}
            last = connection.execute(statement, values | wakeups.wakeup_values(connection, ())).scalar_one()
        done += last
    return done
