"""Find the outbox events of one task: its wake-ups, and the events that tell its `notify` destination how it ended.

No index leads from a task to its events, because every insert of an event would pay for it. Each kind of event is read
from a range of an existing index that begins where the event must be, and of that at most MOST_LOOKED_AT events. So an
event can be missed while a destination has a large backlog, but none is shown that is not the task's.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection

from models.sql import sql
from models.status import EventStatus
from outbox.destinations import CELERY
from outbox.lease_statements import UNREACHABLE
from tasks.operations.listing import columns_of
from tasks.operations.task_details import Details, StoredTask

MOST_LOOKED_AT: Final = 500


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """An outbox event about one task."""

    id: int
    destination: str
    status: EventStatus
    attempt_count: int
    created_at: datetime
    next_retry_at: datetime | None
    sent_at: datetime | None
    locked_by: str | None
    last_error: str | None

    @property
    def is_wakeup(self) -> bool:
        return self.destination.startswith(CELERY)


_COLUMNS: Final = columns_of(TaskEvent)
_NAMES_IT: Final = "payload @> jsonb_build_object('ids', jsonb_build_array(CAST(:id AS text)))"
_IS_ABOUT_IT: Final = "destination = :notify AND payload ->> 'taskId' = :id"
# events: dead wake-ups (by their index), wake-ups that were sent after the task was last woken, and notifications. A
# wake-up for later is sent when it is due.
EVENTS: Final = sql(f"""
    WITH dead_wakeups AS (
        SELECT {_COLUMNS} FROM ledger.outbox_event
        WHERE status = 'DEAD' AND destination LIKE '{CELERY}%' AND payload -> 'ids' ? :id),
    sent AS (
        SELECT {_COLUMNS} FROM (
            SELECT * FROM ledger.outbox_event WHERE status = 'SENT' AND sent_at >= :woken_at
            ORDER BY sent_at LIMIT {MOST_LOOKED_AT}) AS event
        WHERE destination = :wakeups AND {_NAMES_IT}),
    waiting_notifications AS (
        SELECT {_COLUMNS} FROM (
            SELECT * FROM ledger.outbox_event
            WHERE destination = :notify AND status IN ('NEW', 'RETRYING') AND ordering_key IS NULL
            ORDER BY coalesce(next_retry_at, '-infinity') DESC, id DESC LIMIT {MOST_LOOKED_AT}) AS event
        WHERE {_IS_ABOUT_IT}),
    sent_notifications AS (
        SELECT {_COLUMNS} FROM (
            SELECT * FROM ledger.outbox_event WHERE status = 'SENT' AND sent_at >= :ended_at
            ORDER BY sent_at LIMIT {MOST_LOOKED_AT}) AS event
        WHERE {_IS_ABOUT_IT}),
    dead_notifications AS (
        SELECT {_COLUMNS} FROM (
            SELECT * FROM ledger.outbox_event WHERE status = 'DEAD' ORDER BY id DESC LIMIT {MOST_LOOKED_AT}) AS event
        WHERE {_IS_ABOUT_IT})
    SELECT * FROM dead_wakeups UNION ALL SELECT * FROM sent UNION ALL SELECT * FROM waiting_notifications
    UNION ALL SELECT * FROM sent_notifications UNION ALL SELECT * FROM dead_notifications
    ORDER BY id
""")
# unreachable: an event that found this destination unreachable, and waits since then.
UNREACHABLE_EVENT: Final = sql(f"""
    SELECT FROM ledger.outbox_event
    WHERE destination = :destination AND status IN ('RETRYING', 'DEAD') AND last_error LIKE '{UNREACHABLE}%' LIMIT 1
""")


def read_events(connection: Connection, details: Details) -> list[TaskEvent]:
    """Return the events of a task, the oldest first. Unsent wake-ups are taken from its details."""
    task = details.task
    values = {
        "id": str(task.task_id),
        "wakeups": CELERY + task.queue,
        "woken_at": _woken_at(task),
        "notify": task.notify,
        "ended_at": task.finished_at or task.created_at,
    }
    found = [TaskEvent(*row) for row in connection.execute(EVENTS, values)]
    unsent = [
        TaskEvent(
            each.id,
            CELERY + task.queue,
            each.status,
            each.attempt_count,
            each.created_at,
            each.next_retry_at,
            None,
            each.locked_by,
            each.last_error,
        )
        for each in details.wakeups
    ]
    return sorted([*found, *unsent], key=lambda each: each.id)


def is_unreachable(connection: Connection, queue: str) -> bool:
    """Return whether the broker was unreachable when a wake-up for this queue was last tried."""
    return connection.execute(UNREACHABLE_EVENT, {"destination": CELERY + queue}).first() is not None


def _woken_at(task: StoredTask) -> datetime:
    return max(task.last_wakeup_at or task.created_at, task.next_retry_at or task.created_at)
