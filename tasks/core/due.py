"""The kinds of open tasks, (queue, type), found by hopping from one to the next in the index of what is due.

With a million open tasks of three kinds this is three looks. `WITH RECURSIVE` is the statement's own.

Tasks with a partition key wait for each other, not only for their time: in that index they lie behind all others, at
'infinity', so that a key with a hundred thousand of them is in nobody's way. `tasks/core/partition_keys.py` knows
whose turn it is.
"""

from __future__ import annotations

from typing import Final

OPEN: Final = "status IN ('QUEUED', 'RETRYING')"
DUE_AT: Final = "CASE WHEN partition_key IS NULL THEN coalesce(next_retry_at, '-infinity') ELSE 'infinity' END"
TIME: Final = "coalesce(next_retry_at, '-infinity')"  # of any task

KINDS: Final = f"""
    kind (queue, type) AS (
        (SELECT queue, type FROM ledger.ingest_task WHERE {OPEN} ORDER BY queue, type LIMIT 1)
        UNION ALL
        SELECT next.queue, next.type FROM kind CROSS JOIN LATERAL (
            SELECT queue, type FROM ledger.ingest_task WHERE {OPEN} AND (queue, type) > (kind.queue, kind.type)
            ORDER BY queue, type LIMIT 1) AS next)"""  # noqa: S608 - literals of this file
