"""Tasks as people look at them: lists, newest change first, and one task with everything that is known of it.

A list never reads the whole history: what is final comes from its partial indexes by when it finished, what runs from
the leases, what is open from the index of what is due. So its order is the last change of a task, and a page begins
where another ended: `Cursor`.
"""

# ruff: noqa: S608 - every piece is a literal of this file; values are parameters

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection, TextClause

from models.errors import CeleriacError, Misuse
from models.sql import sql
from models.status import TaskStatus
from outbox.lease import Db, connection_of
from tasks.core.due import OPEN
from tasks.core.task_ids import keyed_id

FINAL: Final = frozenset({TaskStatus.SUCCEEDED, TaskStatus.DEAD, TaskStatus.DISCARDED})
_DONE: Final = "status IN ('SUCCEEDED', 'DISCARDED')"
_LEASED: Final = "status = 'RUNNING' AND id IN (SELECT unnest(task_ids) FROM ledger.task_lease)"
# Each status with where it is found, and what tells when it last changed.
_ARMS: Final = {
    TaskStatus.QUEUED: (OPEN, "updated_at"),
    TaskStatus.RETRYING: (OPEN, "updated_at"),
    TaskStatus.RUNNING: (_LEASED, "updated_at"),
    TaskStatus.SUCCEEDED: (_DONE, "finished_at"),
    TaskStatus.DISCARDED: (_DONE, "finished_at"),
    TaskStatus.DEAD: ("status = 'DEAD'", "finished_at"),
}
_FILTERS: Final = """status = ANY(CAST(:statuses AS text[]))
        AND (CAST(:ids AS uuid[]) IS NULL OR id = ANY(CAST(:ids AS uuid[])))
        AND (CAST(:type AS text) IS NULL OR type = :type)
        AND (CAST(:queue AS text) IS NULL OR queue = :queue)
        AND (CAST(:key AS text) IS NULL OR idempotency_key = :key)"""


STATUS: Final = sql("SELECT status FROM ledger.ingest_task WHERE id = :id")


class UnknownTask(CeleriacError):
    """There is no such task."""

    code = "unknown_task"
    http_status = 404

    def __init__(self, task_id: uuid.UUID | str) -> None:
        super().__init__(f"There is no task {task_id}: it was never submitted, or it was pruned.")


def status_of(db: Db, task_id: uuid.UUID) -> TaskStatus:
    """Raises UnknownTask."""
    status = connection_of(db).execute(STATUS, {"id": task_id}).scalar()
    if status is None:
        raise UnknownTask(task_id)
    return TaskStatus(status)


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a list: when the task there had last changed, and its id."""

    changed_at: datetime
    task_id: uuid.UUID

    def __str__(self) -> str:
        return f"{self.changed_at.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}_{self.task_id}"

    @classmethod
    def parse(cls, given: str) -> Cursor:
        at, _, task_id = given.rpartition("_")
        try:
            return cls(datetime.fromisoformat(at).astimezone(UTC), uuid.UUID(task_id))
        except (ValueError, OverflowError):
            raise Misuse(f"{given!r} is no place in a list: a page ends with the one for the next.") from None


@dataclass(frozen=True, slots=True)
class ListedTask:
    """A task for a list: everything but what it carries."""

    task_id: uuid.UUID
    type: str
    status: TaskStatus
    queue: str
    priority: int
    idempotency_key: str | None
    attempt_count: int
    max_attempts: int
    next_retry_at: datetime | None
    error_code: str | None
    error_message: str | None
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None

    @property
    def changed_at(self) -> datetime:
        return self.finished_at or self.updated_at

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.changed_at, self.task_id)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which tasks. `since` and `until` are about the last change."""

    statuses: Collection[TaskStatus] = ()  # none: all
    type: str | None = None
    queue: str | None = None
    key: str | None = None
    since: datetime | None = None
    until: datetime | None = None


def listed(
    connection: Connection,
    wanted: Wanted,
    *,
    before: Cursor | None = None,
    after: Cursor | None = None,
    limit: int = 50,
) -> list[ListedTask]:
    """The latest changes first. `before` begins the next page, towards the past; `after` ends the one before."""
    statuses = list(wanted.statuses or TaskStatus)
    is_forward = after is not None and before is None
    values = {
        "statuses": statuses,
        "type": wanted.type,
        "queue": wanted.queue,
        "key": wanted.key,
        "ids": [keyed_id(wanted.type, wanted.key)] if wanted.key and wanted.type else None,
        "since": wanted.since or "-infinity",
        "until": wanted.until or "infinity",
        "before_at": before.changed_at if before else "infinity",
        "before_id": before.task_id if before else uuid.UUID(int=0),
        "after_at": after.changed_at if after else "-infinity",
        "after_id": after.task_id if after else uuid.UUID(int=0),
        "limit": limit,
    }
    found = [ListedTask(*row) for row in connection.execute(_list(statuses, is_forward=is_forward), values)]
    return found[::-1] if is_forward else found


def statuses_of(connection: Connection, ids: Sequence[uuid.UUID]) -> Counter[TaskStatus | None]:
    """How many of these tasks have which status; None is for those that are gone."""
    found = Counter[TaskStatus | None](map(TaskStatus, connection.execute(STATUSES, {"ids": list(ids)}).scalars()))
    found[None] = len(ids) - found.total()
    return +found


STATUSES: Final = sql("SELECT status FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[]))")
_COLUMNS: Final = ", ".join(field.name for field in fields(ListedTask)).replace("task_id", "id", 1)


def _list(statuses: Collection[TaskStatus], *, is_forward: bool) -> TextClause:
    """list: one arm for each index that holds some of it, of each the first few, and of those the first few."""
    way = "ASC" if is_forward else "DESC"
    arms = []
    for where, changed_at in dict.fromkeys(_ARMS[status] for status in statuses):
        arms.append(f"""
        (SELECT {_COLUMNS}, {changed_at} AS changed_at FROM ledger.ingest_task
         WHERE {where} AND {_FILTERS}
           AND {changed_at} >= :since AND {changed_at} < :until
           AND ({changed_at}, id) < (:before_at, :before_id) AND ({changed_at}, id) > (:after_at, :after_id)
         ORDER BY {changed_at} {way}, id {way} LIMIT :limit)""")
    found = " UNION ALL ".join(arms)
    return sql(f"SELECT {_COLUMNS} FROM ({found}) AS found ORDER BY changed_at {way}, id {way} LIMIT :limit")
