"""Partition keys (P9): tasks of one key run one at a time, in the order in which their submits committed.

Whose turn it is. `key_seq` is drawn under a lock of the key that its transaction keeps until it commits, so whoever is
visible has all its predecessors visible, too. A task may run when nothing of its key stands before it: nothing that is
open, running, or DEAD. A predecessor that is out of the way stays so: SUCCEEDED and DISCARDED are final, and a DEAD
task whose handler says `skip_dead` gets a new place, at the end of its key, when it is requeued.

    key "a":  1 SUCCEEDED   2 RUNNING   3 QUEUED    4 QUEUED         3 is next in line
    key "b":  1 DEAD (holds its key until it is requeued or discarded)    2 QUEUED

A claim may take several consecutive tasks of a key into one batch, in their order, up to the first that is of another
kind, not due, or isolated. They run in that order; the first that does not succeed ends the run, and what comes after
it is given back (`tasks/execution/batch.py`).

Wake-ups. Whoever settles the last task that stood before another wake-ups for that one. A successor whose submit commits at
that very moment is not seen by it, and may be delivered a moment too early: a task that is next in line when its wake-up
comes is therefore woken once more, a little later. Wake-ups for tasks further behind are dropped; their turn wake-ups again.
"""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from models.driver_values import array
from tasks.core.due import OPEN
from tasks.core.registry import Handler

NEXT_SECONDS: Final = 2.0  # after which whoever is next in line is woken once more

UNDONE: Final = "status NOT IN ('SUCCEEDED', 'DISCARDED')"
# What stands in the way of others of its key: everything that is not done, but for the dead of handlers that skip them.
STANDS: Final = f"{UNDONE} AND NOT (status = 'DEAD' AND type = ANY(CAST(:skipping AS text[])))"


def skipping(handlers: Mapping[str, Handler]) -> str:
    """The types whose dead hold nobody up, as the statements take them."""
    return array(type for type, handler in handlers.items() if handler.skip_dead)


def freed(source: str) -> str:
    """The CTE `freed`: who is first now in the keys of what `source` made final; `source` has id and partition_key.

    From now on it waits for its wake-up and no longer for its turn, so that a lost one is noticed after a grace (P8). Who
    is just being woken by somebody else is woken by both.
    """
    return f"""
        freed AS (
            SELECT next.id, next.type, next.queue, next.priority, next.isolated,
                   CASE WHEN next.next_retry_at > at THEN next.next_retry_at END AS due_at
            FROM (SELECT DISTINCT partition_key FROM {source} WHERE partition_key IS NOT NULL) AS key
            CROSS JOIN LATERAL (
                SELECT * FROM ledger.ingest_task
                WHERE partition_key = key.partition_key AND {STANDS} AND id <> ALL(ARRAY(SELECT id FROM {source}))
                ORDER BY key_seq LIMIT 1) AS next CROSS JOIN clock
            WHERE next.{OPEN}),
        free_to_mark AS MATERIALIZED (
            SELECT id FROM ledger.ingest_task WHERE id = ANY(ARRAY(SELECT id FROM freed))
            ORDER BY id FOR NO KEY UPDATE SKIP LOCKED),
        marked AS (
            UPDATE ledger.ingest_task task SET last_wakeup_at = coalesce(freed.due_at, at), updated_at = at
            FROM freed JOIN free_to_mark USING (id) CROSS JOIN clock WHERE task.id = freed.id)"""
