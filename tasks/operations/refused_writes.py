"""List the writes that were refused because the writer had lost its lease, page by page, the latest first.

The audits of tasks and of outbox events have other entries, too; each has an index of the refused ones.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Connection, TextClause

from models.sql import sql
from outbox.audit import AuditCode

PAGE: Final = 50


class Refusal(StrEnum):
    """The codes of refused writes, in `task_audit` and in `outbox_audit`."""

    LATE_SUCCESS = "late_success"
    LEASE_LOST = "lease_lost"
    CONFLICT = AuditCode.CONFLICT


_TASK_CODES: Final = "code IN ('late_success', 'lease_lost') AND (CAST(:code AS text) IS NULL OR code = :code)"
_EVENT_CODE: Final = "code = 'outbox_flush_conflict'"


def _of_tasks(page: str) -> TextClause:
    """Return the statement for a page of refused writes to tasks, each with the task as it is now."""
    return sql(f"""
        SELECT audit.*, task.type AS about, task.status FROM (
            SELECT id, code, worker_id AS process, detail, created_at AS at, task_id, CAST(NULL AS bigint) AS event_id
            FROM ledger.task_audit WHERE {_TASK_CODES} AND {page} LIMIT :limit) AS audit
        LEFT JOIN ledger.ingest_task task ON task.id = audit.task_id ORDER BY audit.id DESC""")


def _of_events(page: str) -> TextClause:
    """Return the statement for a page of refused writes to outbox events, each with the event as it is now."""
    return sql(f"""
        SELECT audit.*, event.destination AS about, event.status FROM (
            SELECT id, code, worker_id AS process, detail, created_at AS at, CAST(NULL AS uuid) AS task_id,
                   outbox_id AS event_id
            FROM ledger.outbox_audit WHERE {_EVENT_CODE} AND {page} LIMIT :limit) AS audit
        LEFT JOIN ledger.outbox_event event ON event.id = audit.event_id ORDER BY audit.id DESC""")


_OLDER: Final = "(CAST(:id AS bigint) IS NULL OR id < :id) ORDER BY id DESC"
_NEWER: Final = "id > :id ORDER BY id"
TASKS_OLDER: Final = _of_tasks(_OLDER)
TASKS_NEWER: Final = _of_tasks(_NEWER)
EVENTS_OLDER: Final = _of_events(_OLDER)
EVENTS_NEWER: Final = _of_events(_NEWER)


@dataclass(frozen=True, slots=True)
class RefusedWrite:
    """One refused write: which process tried it, to what, and what that is now."""

    id: int
    code: Refusal
    process: str
    detail: str | None
    at: datetime
    task_id: uuid.UUID | None
    event_id: int | None
    about: str | None  # the type of the task, or the destination of the event; None if it is gone
    status: str | None


@dataclass(frozen=True, slots=True)
class Page:
    """Some refused writes, and the ids from which the neighbouring pages start; None if there is no such page."""

    writes: list[RefusedWrite]
    newer_than: int | None
    older_than: int | None


def list_refused(
    connection: Connection, code: Refusal | None = None, *, before: int | None = None, after: int | None = None
) -> Page:
    """Return a page of refused writes to tasks; with the code CONFLICT, to outbox events.

    `before` and `after` are ids: the page has older entries, or newer ones. Without them it has the latest.
    """
    is_newer = after is not None and before is None
    if code is Refusal.CONFLICT:
        statement = EVENTS_NEWER if is_newer else EVENTS_OLDER
    else:
        statement = TASKS_NEWER if is_newer else TASKS_OLDER
    values: dict[str, Any] = {"code": code, "id": after if is_newer else before, "limit": PAGE + 1}
    found = [
        RefusedWrite(**{**row, "code": Refusal(row["code"])})
        for row in connection.execute(statement, values).mappings()
    ]
    is_full = len(found) > PAGE
    if is_newer:
        writes = found[-PAGE:]
        has_newer, has_older = is_full, True
    else:
        writes = found[:PAGE]
        has_newer, has_older = before is not None, is_full
    return Page(
        writes,
        newer_than=writes[0].id if writes and has_newer else None,
        older_than=writes[-1].id if writes and has_older else None,
    )
