"""SQL expressions for tasks that wait, and for their order in the index `ix_ingest_task_due`.

The index sorts open tasks by queue, type and due time. A task with a partition key waits for its predecessors, not only
for its time. The index sorts these tasks behind all others, at 'infinity', so that a key with a hundred thousand tasks
slows nothing down; `tasks/core/partition_keys.py` decides which of them is next. The same goes for tasks that wait for
a limit (`tasks/core/limits.py`).
"""

from __future__ import annotations

from typing import Final

OPEN: Final = "status IN ('QUEUED', 'RETRYING')"
DUE_AT: Final = """CASE WHEN partition_key IS NULL AND limited_at IS NULL
                   THEN coalesce(next_retry_at, '-infinity') ELSE 'infinity' END"""
TIME: Final = "coalesce(next_retry_at, '-infinity')"  # when a task is due, whether or not it has a partition key
# Since when a task waits: since it became due or was last changed, as by a requeue. While it waits for a limit, it is
# changed again and again.
SINCE: Final = "coalesce(limited_at, greatest(next_retry_at, updated_at))"

# The task may still start (`submit(…, expires=…)`). The statement has the current time in its CTE `clock`.
NOT_EXPIRED: Final = "coalesce(expires_at > (SELECT at FROM clock), true)"

# An operator has paused the queue. PostgreSQL reads the paused queues once per statement; usually there are none.
IS_PAUSED: Final = "queue IN (SELECT queue FROM ledger.queue_pause WHERE NOT intake)"

# The pairs (queue, type) of open tasks, found by skipping from one to the next in the index: with a million open tasks
# of three kinds these are three index lookups. The statement must begin with WITH RECURSIVE.
KINDS: Final = f"""
    kind (queue, type) AS (
        (SELECT queue, type FROM ledger.ingest_task WHERE {OPEN} ORDER BY queue, type LIMIT 1)
        UNION ALL
        SELECT next.queue, next.type FROM kind CROSS JOIN LATERAL (
            SELECT queue, type FROM ledger.ingest_task WHERE {OPEN} AND (queue, type) > (kind.queue, kind.type)
            ORDER BY queue, type LIMIT 1) AS next)"""
