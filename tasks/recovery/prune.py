"""Delete final tasks and their history after their retention, in small batches, each in a short transaction.

SUCCEEDED and DISCARDED tasks share one retention. DEAD tasks have their own, which is unlimited by default. A task with
an idempotency key leaves a tombstone, so that a late submit of the same key is still recognised; tombstones have a
retention, too, and so have receipts. A DEAD task has blocked its partition key: deleting it wakes the next task of that
key. Limits that are not used are deleted.
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


def _prune_tasks(statuses: str, then: str = "") -> TextClause:
    return sql(f"""
        WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
        old AS MATERIALIZED (
            SELECT id FROM ledger.ingest_task
            WHERE status IN ({statuses}) AND finished_at < (SELECT at FROM clock) - make_interval(hours => :hours)
            ORDER BY finished_at LIMIT :batch FOR UPDATE SKIP LOCKED),
        gone AS (
            DELETE FROM ledger.ingest_task task USING old WHERE task.id = old.id
            RETURNING task.id, task.status, task.payload, task.idempotency_key, task.partition_key),
        tombstones AS (
            INSERT INTO ledger.task_tombstone (id, status, payload_sha, created_at)
            SELECT id, status, ledger.ingest_payload_sha(payload), (SELECT at FROM clock) FROM gone
            WHERE idempotency_key IS NOT NULL ON CONFLICT (id) DO NOTHING),
        transitions AS (DELETE FROM ledger.ingest_task_transition t USING old WHERE t.task_id = old.id),
        audits AS (DELETE FROM ledger.task_audit a USING old WHERE a.task_id = old.id),
        steps AS (DELETE FROM ledger.task_step s USING old WHERE s.task_id = old.id)
        {then}
        SELECT count(*) FROM gone
    """)


# prune_done, prune_dead: final for longer than the retention → deleted, oldest first.
PRUNE_DONE: Final = _prune_tasks("'SUCCEEDED', 'DISCARDED'")
PRUNE_DEAD: Final = _prune_tasks("'DEAD'", f",{partition_keys.find_freed('gone')}, {wakeups.insert_wakeups('freed')}")
PRUNE_TOMBSTONES: Final = sql("""
    WITH old AS MATERIALIZED (
        SELECT id FROM ledger.task_tombstone
        WHERE created_at < (SELECT ledger.ledger_now()) - make_interval(hours => :hours)
        LIMIT :batch FOR UPDATE SKIP LOCKED),
    gone AS (DELETE FROM ledger.task_tombstone t USING old WHERE t.id = old.id RETURNING t.id)
    SELECT count(*) FROM gone
""")


PRUNE_RECEIPTS: Final = sql("""
    WITH old AS MATERIALIZED (
        SELECT seq FROM ledger.receipt
        WHERE saved_at < (SELECT ledger.ledger_now()) - make_interval(hours => :hours)
        ORDER BY saved_at LIMIT :batch FOR UPDATE SKIP LOCKED),
    gone AS (DELETE FROM ledger.receipt USING old WHERE receipt.seq = old.seq RETURNING receipt.seq)
    SELECT count(*) FROM gone
""")


# prune_limits: a limit that was not used for longer than any bucket takes to be full again; without a row it is full.
LIMIT_HOURS: Final = 48
PRUNE_LIMITS: Final = sql("""
    WITH old AS MATERIALIZED (
        SELECT type, limit_key FROM ledger.task_limit
        WHERE refilled_at < (SELECT ledger.ledger_now()) - make_interval(hours => :hours)
        LIMIT :batch FOR UPDATE SKIP LOCKED),
    gone AS (
        DELETE FROM ledger.task_limit USING old
        WHERE task_limit.type = old.type AND task_limit.limit_key = old.limit_key RETURNING old.type)
    SELECT count(*) FROM gone
""")


@dataclass(frozen=True, slots=True)
class Pruned:
    """How many rows were deleted."""

    tasks: int
    tombstones: int
    receipts: int = 0


def prune(engine: Engine, settings: Settings, *, budget_seconds: float = 5.0) -> Pruned:
    """Delete until no row is old enough or the time is over."""
    deadline = time.monotonic() + budget_seconds
    tasks = _delete_old(engine, PRUNE_DONE, settings.ingest_succeeded_retention_hours, deadline)
    if settings.ingest_dead_retention_hours:
        tasks += _delete_old(engine, PRUNE_DEAD, settings.ingest_dead_retention_hours, deadline)
    tombstones = _delete_old(engine, PRUNE_TOMBSTONES, settings.ingest_tombstone_retention_hours, deadline)
    receipts = _delete_old(engine, PRUNE_RECEIPTS, settings.receipt_retention_hours, deadline)
    _delete_old(engine, PRUNE_LIMITS, LIMIT_HOURS, deadline)
    return Pruned(tasks, tombstones, receipts)


def _delete_old(engine: Engine, statement: TextClause, hours: int, deadline: float) -> int:
    total, last = 0, BATCH
    while last == BATCH and time.monotonic() < deadline:
        with engine.begin() as connection:
            values = {"hours": hours, "batch": BATCH, "skipping": partition_keys.skipping(handlers())}
            last = connection.execute(statement, values | wakeups.wakeup_values(connection, ())).scalar_one()
        total += last
    return total
