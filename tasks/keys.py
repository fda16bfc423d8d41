"""Partition keys (P9): tasks of one key run one at a time, in the order in which their submits committed.

Whose turn it is. `key_seq` is drawn under a lock of the key that its transaction keeps until it commits, so whoever is
visible has all its predecessors visible, too. A task may run when nothing of its key stands before it: nothing that is
open, running, or DEAD. A predecessor that is out of the way stays so: SUCCEEDED and DISCARDED are final, and a DEAD
task whose handler says `skip_dead` gets a new place, at the end of its key, when it is requeued.

    key "a":  1 SUCCEEDED   2 RUNNING   3 QUEUED    4 QUEUED         3 is next in line
    key "b":  1 DEAD (holds its key until it is requeued or discarded)    2 QUEUED

A claim may take several consecutive tasks of a key into one batch, in their order, up to the first that is of another
kind, not due, or isolated. They run in that order; the first that does not succeed ends the run, and what comes after
it is given back (`tasks/batch.py`).

Rings. Whoever settles the last task that stood before another rings for that one. A successor whose submit commits at
that very moment is not seen by it, and may be delivered a moment too early: a task that is next in line when its ring
comes is therefore rung once more, a little later. Rings for tasks further behind are dropped; their turn rings again.
"""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection

from models.arrays import array
from tasks.guard import DUE, Claim, claim, claim_statement
from tasks.kinds import OPEN
from tasks.registry import Handler

NEXT_SECONDS: Final = 2.0  # after which whoever is next in line is rung once more

UNDONE: Final = "status NOT IN ('SUCCEEDED', 'DISCARDED')"
# What stands in the way of others of its key: everything that is not done, but for the dead of handlers that skip them.
STANDS: Final = f"{UNDONE} AND NOT (status = 'DEAD' AND type = ANY(CAST(:skipping AS text[])))"

# claim_keyed: own ids whose turn it is, then the tasks that follow them in their keys.
CLAIM_KEYED: Final = claim_statement(
    f"""
    turn AS MATERIALIZED (
        SELECT own.*, (
            SELECT status FROM ingest_task before
            WHERE before.partition_key = own.partition_key AND before.key_seq < own.key_seq AND {STANDS}
            ORDER BY before.key_seq DESC LIMIT 1) AS before
        FROM own WHERE open AND due AND batch IS NOT NULL AND own.partition_key IS NOT NULL),
    kind AS MATERIALIZED (
        SELECT type, queue, priority, isolated, CASE WHEN isolated THEN 1 ELSE batch END AS most, relaxed
        FROM turn WHERE before IS NULL ORDER BY isolated, place LIMIT 1),
    mine AS MATERIALIZED (
        SELECT turn.id, turn.rung_at, partition_key, key_seq FROM turn JOIN kind USING (type, queue, priority, isolated)
        WHERE before IS NULL ORDER BY place LIMIT (SELECT most FROM kind)),
    run_on AS MATERIALIZED (
        SELECT next.* FROM kind CROSS JOIN mine CROSS JOIN LATERAL (
            SELECT id, partition_key, key_seq, bool_and(fits) OVER in_order AS fits, row_number() OVER in_order AS place
            FROM (
                SELECT id, partition_key, key_seq, NOT isolated AND {OPEN} AND {DUE} AND type = kind.type
                           AND queue = kind.queue AND priority = kind.priority AS fits
                FROM ingest_task WHERE partition_key = mine.partition_key AND key_seq > mine.key_seq AND {UNDONE}
                ORDER BY key_seq LIMIT (SELECT kind.most / count(*) FROM mine)) AS following
            WINDOW in_order AS (ORDER BY key_seq)) AS next
        WHERE fits AND NOT kind.isolated
        ORDER BY place, partition_key LIMIT (SELECT kind.most - count(*) FROM kind, mine GROUP BY kind.most)),
    wanted AS MATERIALIZED (
        SELECT id, partition_key, key_seq FROM mine UNION ALL SELECT id, partition_key, key_seq FROM run_on),
    locked AS MATERIALIZED (
        SELECT task.* FROM (SELECT id FROM wanted ORDER BY id) AS wanted CROSS JOIN LATERAL (
            SELECT id, status, attempt_count FROM ingest_task
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


def skipping(handlers: Mapping[str, Handler]) -> str:
    """The types whose dead hold nobody up, as the statements take them."""
    return array(type for type, handler in handlers.items() if handler.skip_dead)


def freed(source: str) -> str:
    """The CTE `freed`: who is first now in the keys of what `source` made final; `source` has id and partition_key.

    From now on it waits for its ring and no longer for its turn, so that a lost one is noticed after a grace (P8). Who
    is just being rung by somebody else is rung by both.
    """
    return f"""
        freed AS (
            SELECT next.id, next.type, next.queue, next.priority, next.isolated,
                   CASE WHEN next.next_retry_at > at THEN next.next_retry_at END AS due_at
            FROM (SELECT DISTINCT partition_key FROM {source} WHERE partition_key IS NOT NULL) AS key
            CROSS JOIN LATERAL (
                SELECT * FROM ingest_task
                WHERE partition_key = key.partition_key AND {STANDS} AND id <> ALL(ARRAY(SELECT id FROM {source}))
                ORDER BY key_seq LIMIT 1) AS next CROSS JOIN clock
            WHERE next.{OPEN}),
        free_to_mark AS MATERIALIZED (
            SELECT id FROM ingest_task WHERE id = ANY(ARRAY(SELECT id FROM freed))
            ORDER BY id FOR NO KEY UPDATE SKIP LOCKED),
        marked AS (
            UPDATE ingest_task task SET rung_at = coalesce(freed.due_at, at), updated_at = at
            FROM freed JOIN free_to_mark USING (id) CROSS JOIN clock WHERE task.id = freed.id)"""
