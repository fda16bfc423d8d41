"""Notices: whoever asked to be notified is told the final status of a task through the outbox, in one statement."""

from __future__ import annotations


def notified(source: str, status: str) -> str:
    """The CTE `notified`, for tasks that `source` made final; it has id, type, attempt_count, error_message, notify."""
    return f"""
        notified AS (
            INSERT INTO ledger.outbox_event (destination, payload, created_at)
            SELECT notify, jsonb_build_object('taskId', id, 'type', type, 'status', '{status}',
                                              'attemptCount', attempt_count, 'errorMessage', error_message), at
            FROM {source} CROSS JOIN clock WHERE notify IS NOT NULL)"""  # noqa: S608 - literals of our own
