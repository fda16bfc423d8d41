"""Partition keys: tasks of one key run one at a time, in the order in which their submits committed.

Order. `key_seq` is drawn under a lock on the key that is held until the commit, so when a task is visible, all its
predecessors are. A task may run when no task before it in its key is open, running or DEAD. That cannot change back:
SUCCEEDED and DISCARDED are final, and a DEAD task of a handler with `skip_dead` gets a new `key_seq`, at the end of its
key, when it is requeued.

    key "a":  1 SUCCEEDED   2 RUNNING   3 QUEUED    4 QUEUED         3 is next in line
    key "b":  1 DEAD (blocks its key until it is requeued or discarded)    2 QUEUED

Batches. A claim may take several consecutive tasks of a key into one batch, up to the first that has another type or
queue, is not due, or is isolated. They run in order. The first that does not succeed ends the run, and those behind it
are released (`tasks/execution/run.py`).

Wake-ups. The statement that finishes a task inserts the wake-up of the next one. It does not see a successor whose
submit commits at the same moment, and that task's own wake-up may arrive too early. So a task that is next in line when
its wake-up arrives is woken once more, a little later. Wake-ups for tasks further behind are dropped; those tasks are
woken when their turn comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from models.driver_values import array
from tasks.core.due_times import OPEN
from tasks.core.registry import Handler

NEXT_SECONDS: Final = 2.0  # after which a task that is next in line is woken once more

UNDONE: Final = "status NOT IN ('SUCCEEDED', 'DISCARDED')"
# A task that blocks its successors: it is not done, and not a DEAD task of a handler with `skip_dead`.
BLOCKS: Final = f"{UNDONE} AND NOT (status = 'DEAD' AND type = ANY(CAST(:skipping AS text[])))"


def skipping(handlers: Mapping[str, Handler]) -> str:
    """Return the parameter `skipping`: the types whose DEAD tasks do not block their keys."""
    return array(type for type, handler in handlers.items() if handler.skip_dead)


def find_freed(source: str) -> str:
    """Return a CTE `freed` with the next tasks of the keys in which `source` made a task final.

    `source` has the columns id and partition_key; the statement needs a CTE `clock`. A freed task no longer waits for
    its turn but for its wake-up, so that a lost wake-up is noticed after a grace. Two statements that free the same
    task both wake it.
    """
    return f"""
        freed AS (
            SELECT next.id, next.type, next.queue, next.priority, next.isolated,
                   CASE WHEN next.next_retry_at > at THEN next.next_retry_at END AS due_at
            FROM (SELECT DISTINCT partition_key FROM {source} WHERE partition_key IS NOT NULL) AS key
            CROSS JOIN LATERAL (
                SELECT * FROM ledger.ingest_task
                WHERE partition_key = key.partition_key AND {BLOCKS} AND id <> ALL(ARRAY(SELECT id FROM {source}))
                ORDER BY key_seq LIMIT 1) AS next CROSS JOIN clock
            WHERE next.{OPEN}),
        free_to_mark AS MATERIALIZED (
            SELECT id FROM ledger.ingest_task WHERE id = ANY(ARRAY(SELECT id FROM freed))
            ORDER BY id FOR NO KEY UPDATE SKIP LOCKED),
        marked AS (
            UPDATE ledger.ingest_task task SET last_wakeup_at = coalesce(freed.due_at, at), updated_at = at
            FROM freed JOIN free_to_mark USING (id) CROSS JOIN clock WHERE task.id = freed.id)"""
