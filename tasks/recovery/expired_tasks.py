"""Discard tasks that were not started before they expired (`submit(…, expires=…)`).

    QUEUED, expires_at has passed ──► DISCARDED, with the reason

A claim never starts such a task, and clears `expires_at` of every task that it starts: a task that has run once does
not expire, however often it is retried, snoozed or released. This tick discards the expired tasks, whether or not a
wake-up for them is on its way. It counts them in the tally, and wakes the next task of each partition key.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from models.sql import sql
from settings import Settings
from tally.append import APPEND, Counted, Sums, append_values
from tally.subjects import Subject
from tasks.core import partition_keys, wakeups
from tasks.core.discarding import DISCARD_HELD
from tasks.core.holders import actor
from tasks.core.registered_types import registered_limits
from tasks.core.registry import handlers
from tasks.execution.limits import wake_waiting
from tasks.execution.outcome_log import parts
from tracing import TRACEPARENT, batch_fields, trace_id_of, traceparent_of

logger = logging.getLogger(__name__)

BATCH: Final = 500
BUDGET_SECONDS: Final = 5.0
REASON: Final = "it expired before it started"

# discard_expired: QUEUED, expired → DISCARDED, longest expired first.
DISCARD_EXPIRED: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    held AS MATERIALIZED (
        SELECT id, status, queue, type, context FROM ledger.ingest_task
        WHERE status = 'QUEUED' AND expires_at <= (SELECT at FROM clock)
        ORDER BY expires_at LIMIT :batch FOR NO KEY UPDATE SKIP LOCKED),
    {DISCARD_HELD}
    SELECT (SELECT jsonb_agg(jsonb_build_array(
                queue, type, id, context -> '{TRACEPARENT}', context -> 'traceId')) FROM held) AS discarded, ours
    FROM wakeups
""")


@dataclass(frozen=True, slots=True)
class ExpiredTask:
    """What the log says about a task that has expired."""

    id: uuid.UUID
    type: str
    queue: str
    context: Mapping[str, Any]  # only the fields that name its trace

    @property
    def traceparent(self) -> str:
        return traceparent_of(self.id, self.context)

    @property
    def trace_id(self) -> str:
        return trace_id_of(self.id, self.context)


def discard_expired(engine: Engine, settings: Settings, *, budget_seconds: float = BUDGET_SECONDS) -> int:
    """Discard all expired tasks, a page in each transaction, and return their number."""
    deadline = time.monotonic() + budget_seconds
    total, last = 0, BATCH
    while last == BATCH and time.monotonic() < deadline:
        last = _discard_page(engine, settings)
        total += last
    return total


def _discard_page(engine: Engine, settings: Settings) -> int:
    with Session(engine) as db:
        values = {"batch": BATCH, "reason": REASON, "actor": actor(), "skipping": partition_keys.skipping(handlers())}
        row = db.execute(DISCARD_EXPIRED, {**values, **wakeups.wakeup_values(db, settings.ingest_queues)}).one()
        if not row.discarded:
            return 0
        wakeups.publish_after_commit(db, row.ours)
        expired: dict[tuple[str, str], list[ExpiredTask]] = defaultdict(list)
        for queue, type_, id_, traceparent, trace_id in row.discarded:
            context = {TRACEPARENT: traceparent, "traceId": trace_id}
            expired[queue, type_].append(ExpiredTask(uuid.UUID(id_), type_, queue, context))
        counted = {
            Counted(Subject.TASK, "discarded", queue, type_): Sums.of(len(tasks))
            for (queue, type_), tasks in expired.items()
        }
        db.execute(APPEND, append_values(counted))
        ids = [task.id for tasks in expired.values() for task in tasks]
        wake_waiting(db, ids, limits=registered_limits(db.connection()))
        db.commit()
    for (_, type_), tasks in expired.items():
        for some in parts(tasks):
            fields = {"event": "tasks_expired", **batch_fields(some)}
            logger.info("Expired before they started: %d of %s", len(some), type_, extra=fields)
    return len(ids)
