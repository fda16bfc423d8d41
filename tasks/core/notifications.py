"""Notifications: tell the destination in a task's `notify` its final status, through the outbox."""

from __future__ import annotations


def insert_notifications(source: str, status: str) -> str:
    """Return a CTE that inserts an event for each task in `source` that has a destination to notify.

    `source` holds tasks that became final and has the columns id, type, attempt_count, error_message and notify. The
    statement needs a CTE `clock`.
    """
    return f"""
        notified AS (
            INSERT INTO ledger.outbox_event (destination, payload, created_at)
            SELECT notify, jsonb_build_object('taskId', id, 'type', type, 'status', '{status}',
                                              'attemptCount', attempt_count, 'errorMessage', error_message), at
            FROM {source} CROSS JOIN clock WHERE notify IS NOT NULL)"""
