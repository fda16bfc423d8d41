"""The SQL with which tasks are discarded outside their handlers: by an operator, by their submitter, or by expiry."""

from __future__ import annotations

from typing import Final

from tasks.core import partition_keys, wakeups
from tasks.core.notifications import insert_notifications

# The tasks in `held` → DISCARDED. A running one loses its lease; `notify` events are sent, and the next task of each
# partition key is woken.
DISCARD_HELD: Final = f"""
    gone AS (
        UPDATE ledger.ingest_task task SET status = 'DISCARDED', lease_token = NULL, finished_at = at, updated_at = at
        FROM held, clock WHERE task.id = held.id
        RETURNING task.id, task.type, attempt_count, error_message, notify, task.partition_key),
    told AS (
        INSERT INTO ledger.ingest_task_transition
            (task_id, from_status, to_status, attempt_count, message, actor, created_at)
        SELECT id, held.status, 'DISCARDED', attempt_count, coalesce(:reason, 'discarded'), :actor, at
        FROM gone JOIN held USING (id) CROSS JOIN clock),
    {insert_notifications("gone", "DISCARDED")},
    {partition_keys.find_freed("gone")},
    {wakeups.insert_wakeups("freed")}"""
