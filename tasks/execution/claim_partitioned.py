"""Claiming tasks that have a partition key: those whose turn it is (`tasks/core/partition_keys.py`)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection

from tasks.core.due_times import OPEN
from tasks.core.partition_keys import BLOCKS, UNDONE, skipping
from tasks.core.registry import Handler
from tasks.execution.claim import DUE, Claim, claim, claim_statement

# claim_keyed: own ids whose turn it is, then the tasks that follow them in their keys.
CLAIM_KEYED: Final = claim_statement(
    f"""
    turn AS MATERIALIZED (
        SELECT own.*, (
            SELECT status FROM ledger.ingest_task before
            WHERE before.partition_key = own.partition_key AND before.key_seq < own.key_seq AND {BLOCKS}
            ORDER BY before.key_seq DESC LIMIT 1) AS before
        FROM own WHERE open AND due AND batch IS NOT NULL AND own.partition_key IS NOT NULL),
    kind AS MATERIALIZED (
        SELECT type, queue, priority, isolated, CASE WHEN isolated THEN 1 ELSE batch END AS most, relaxed
        FROM turn WHERE before IS NULL ORDER BY isolated, place LIMIT 1),
    mine AS MATERIALIZED (
        SELECT turn.id, turn.last_wakeup_at, partition_key, key_seq
        FROM turn JOIN kind USING (type, queue, priority, isolated)
        WHERE before IS NULL ORDER BY place LIMIT (SELECT most FROM kind)),
    run_on AS MATERIALIZED (
        SELECT next.* FROM kind CROSS JOIN mine CROSS JOIN LATERAL (
            SELECT id, partition_key, key_seq, bool_and(fits) OVER in_order AS fits, row_number() OVER in_order AS place
            FROM (
                SELECT id, partition_key, key_seq, NOT isolated AND {OPEN} AND {DUE} AND type = kind.type
                           AND queue = kind.queue AND priority = kind.priority AS fits
                FROM ledger.ingest_task WHERE partition_key = mine.partition_key AND key_seq > mine.key_seq AND {UNDONE}
                ORDER BY key_seq LIMIT (SELECT kind.most / count(*) FROM mine)) AS following
            WINDOW in_order AS (ORDER BY key_seq)) AS next
        WHERE fits AND NOT kind.isolated
        ORDER BY place, partition_key LIMIT (SELECT kind.most - count(*) FROM kind, mine GROUP BY kind.most)),
    wanted AS MATERIALIZED (
        SELECT id, partition_key, key_seq FROM mine UNION ALL SELECT id, partition_key, key_seq FROM run_on),
    locked AS MATERIALIZED (
        SELECT task.* FROM (SELECT id FROM wanted ORDER BY id) AS wanted CROSS JOIN LATERAL (
            SELECT id, status, attempt_count FROM ledger.ingest_task
            WHERE id = wanted.id AND {OPEN} AND {DUE} FOR NO KEY UPDATE SKIP LOCKED) AS task),
    held AS MATERIALIZED (
        SELECT id, status, attempt_count FROM (
            SELECT wanted.id, status, attempt_count,
                   bool_and(locked.id IS NOT NULL) OVER (PARTITION BY partition_key ORDER BY key_seq) AS unbroken
            FROM wanted LEFT JOIN locked ON locked.id = wanted.id) AS run
        WHERE unbroken)""",
    verdict="""WHEN partition_key IS NULL THEN 'LEFT'
                 WHEN (SELECT before FROM turn WHERE turn.id = own.id) = 'RUNNING' THEN 'NEXT'
                 WHEN (SELECT before FROM turn WHERE turn.id = own.id) IS NOT NULL THEN 'NOT_DUE'""",
)


def claim_keyed(
    connection: Connection,
    ids: Sequence[str | uuid.UUID],
    *,
    handlers: Mapping[str, Handler],
    **options: Any,
) -> Claim:
    """As `guard.claim`; the tasks are in the order of their keys. What must wait for others is `not_due`."""
    found = claim(connection, ids, handlers=handlers, statement=CLAIM_KEYED, skipping=skipping(handlers), **options)
    found.tasks.sort(key=lambda task: task.key_seq or 0)
    found.not_due.extend(found.next_in_line)
    return found
