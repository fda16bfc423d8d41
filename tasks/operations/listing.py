"""List tasks, the latest change first, page by page; and look up the status of known tasks.

No list reads the whole history. Final tasks are read from partial indexes by the time they finished, running tasks from
the leases, and open tasks from the index of due tasks. So a list is ordered by the last change of each task, and a
`Cursor` says where a page begins.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import Connection, TextClause

from models.errors import CeleriacError, Misuse
from models.sql import sql
from models.status import TaskStatus
from outbox.lease import Db, connection_of
from tasks.core.due_times import OPEN
from tasks.core.partition_keys import UNDONE
from tasks.core.task_ids import keyed_id

FINAL: Final = frozenset({TaskStatus.SUCCEEDED, TaskStatus.DEAD, TaskStatus.DISCARDED})
_RUNNING: Final = "status = 'RUNNING' AND id IN (SELECT unnest(task_ids) FROM ledger.task_lease)"
_CHANGED_AT: Final = "coalesce(finished_at, updated_at)"


@dataclass(frozen=True, slots=True)
class Source:
    """An index from which tasks are read in the order of their last change."""

    where: str  # the condition that selects it
    statuses: frozenset[TaskStatus]
    changed_at: str  # the column with the last change


def _source(where: str, changed_at: str, *statuses: TaskStatus) -> Source:
    return Source(where, frozenset(statuses), changed_at)


RETRYING: Final = _source("status = 'RETRYING'", "updated_at", TaskStatus.RETRYING)
DISCARDED: Final = _source("status = 'DISCARDED'", "finished_at", TaskStatus.DISCARDED)
DEAD: Final = _source("status = 'DEAD'", "finished_at", TaskStatus.DEAD)
WAITING: Final = _source(OPEN, "updated_at", TaskStatus.QUEUED, TaskStatus.RETRYING)
DONE: Final = _source("status IN ('SUCCEEDED', 'DISCARDED')", "finished_at", TaskStatus.SUCCEEDED, TaskStatus.DISCARDED)
_SOURCES: Final = (WAITING, _source(_RUNNING, "updated_at", TaskStatus.RUNNING), DONE, DEAD)
# Of the statuses in one index, these may be few among many others, and have an index of their own.
_ALONE: Final = {each.statuses: each for each in (RETRYING, DISCARDED)}
MATCHES: Final = """status = ANY(CAST(:statuses AS text[]))
        AND (CAST(:ids AS uuid[]) IS NULL OR id = ANY(CAST(:ids AS uuid[])))
        AND (CAST(:type AS text) IS NULL OR type = :type)
        AND (CAST(:queue AS text) IS NULL OR queue = :queue)
        AND (CAST(:key AS text) IS NULL OR idempotency_key = :key)
        AND (CAST(:error_code AS text) IS NULL OR error_code = :error_code)
        AND (CAST(:partition_key AS text) IS NULL OR partition_key = :partition_key)
        AND (CAST(:error_fingerprint AS text) IS NULL OR error_fingerprint = :error_fingerprint)
        AND (CAST(:error_text AS text) IS NULL OR strpos(lower(error_message), lower(:error_text)) > 0)"""
# The tasks of a principal are in an index of their own, by their last change, unless they run.
_OF_PRINCIPAL: Final = "context ->> 'principal' = :principal"
_SOURCES_OF_PRINCIPAL: Final = (
    Source(f"{_OF_PRINCIPAL} AND status <> 'RUNNING'", frozenset(TaskStatus) - {TaskStatus.RUNNING}, _CHANGED_AT),
    _source(f"{_OF_PRINCIPAL} AND {_RUNNING}", "updated_at", TaskStatus.RUNNING),
)


class UnknownTask(CeleriacError):
    """There is no such task.

    The id is not in the ledger, or the API token may not read that task.
    """

    code = "unknown_task"
    remedy = "Check the id. A final task is deleted when its retention is over (INGEST_SUCCEEDED_RETENTION_HOURS)."
    http_status = 404

    def __init__(self, task_id: uuid.UUID | str) -> None:
        super().__init__(f"There is no task {task_id}: it was never submitted, or it was pruned.")


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in a list: the last change of a task, and its id."""

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
            raise Misuse(f"{given!r} is not a cursor; use the one printed below the previous page.") from None


@dataclass(frozen=True, slots=True)
class ListedTask:
    """A task as lists show it: without payload, context and result."""

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
class TaskFilter:
    """Which tasks to list. `since` and `until` are about the last change."""

    statuses: Collection[TaskStatus] = ()  # empty: all
    type: str | None = None
    queue: str | None = None
    key: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    error_code: str | None = None
    principal: str | None = None  # None: of everyone
    ids: Collection[uuid.UUID] | None = None
    partition_key: str | None = None
    error_fingerprint: str | None = None
    error_text: str | None = None  # within the error message, in upper or lower case


def list_tasks(
    connection: Connection,
    chosen: TaskFilter,
    *,
    before: Cursor | None = None,
    after: Cursor | None = None,
    limit: int = 50,
) -> list[ListedTask]:
    """Return the latest changes first: those older than `before`, or the page right above `after`."""
    is_forward = after is not None and before is None
    statement, values = _query(chosen, before, after, limit, is_forward=is_forward)
    found = [ListedTask(*row) for row in connection.execute(statement, values)]
    return found[::-1] if is_forward else found


def status_of(db: Db, task_id: uuid.UUID) -> TaskStatus:
    """Return the status of a task. Raises UnknownTask."""
    status = connection_of(db).execute(STATUSES, {"ids": [task_id]}).scalar()
    if status is None:
        raise UnknownTask(task_id)
    return TaskStatus(status)


def statuses_of(connection: Connection, ids: Sequence[uuid.UUID]) -> Counter[TaskStatus | None]:
    """Count these tasks by status. None stands for tasks that do not exist or were pruned."""
    found = Counter[TaskStatus | None](map(TaskStatus, connection.execute(STATUSES, {"ids": list(ids)}).scalars()))
    found[None] = len(ids) - found.total()
    return +found


STATUSES: Final = sql("SELECT status FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[]))")


def columns_of(shape: type[Any]) -> str:
    """Return the columns for the fields of a dataclass, in their order; `task_id` is the column `id`."""
    return ", ".join(field.name for field in fields(shape)).replace("task_id", "id", 1)


def between(source: Source) -> str:
    """Return the condition that the last change is in the chosen time, and between the cursors of a page."""
    at = source.changed_at
    return f"""{at} >= :since AND {at} < :until
           AND ({at}, id) < (:before_at, :before_id) AND ({at}, id) > (:after_at, :after_id)"""


def match_values(chosen: TaskFilter) -> dict[str, Any]:
    """Return the parameters of MATCHES, and `since` and `until`."""
    ids = chosen.ids
    if ids is None and chosen.key and chosen.type:
        ids = [keyed_id(chosen.type, chosen.key)]
    return asdict(chosen) | {
        "statuses": list(chosen.statuses or TaskStatus),
        "ids": None if ids is None else list(ids),
        "since": chosen.since or "-infinity",
        "until": chosen.until or "infinity",
    }


def cursor_values(before: Cursor | None, after: Cursor | None) -> dict[str, Any]:
    """Return the parameters between which a page lies."""
    return {
        "before_at": before.changed_at if before else "infinity",
        "before_id": before.task_id if before else uuid.UUID(int=0),
        "after_at": after.changed_at if after else "-infinity",
        "after_id": after.task_id if after else uuid.UUID(int=0),
    }


def needed_sources(chosen: TaskFilter) -> list[Source]:
    """Return the indexes that have the chosen tasks."""
    statuses = frozenset(chosen.statuses or TaskStatus)
    if chosen.principal is not None:
        return [each for each in _SOURCES_OF_PRINCIPAL if each.statuses & statuses]
    return [_ALONE.get(each.statuses & statuses, each) for each in _SOURCES if each.statuses & statuses]


def narrowed(source: Source, chosen: TaskFilter) -> str:
    """Return the condition that selects the index, with those filters for which there is a better index."""
    conditions = [source.where]
    if chosen.ids is not None or (chosen.key and chosen.type):
        conditions.append("id = ANY(CAST(:ids AS uuid[]))")
    if chosen.partition_key is not None and source not in (DONE, DISCARDED):
        conditions.append(f"partition_key = :partition_key AND {UNDONE}")
    if chosen.type is not None and chosen.error_fingerprint is not None and source is DEAD:
        conditions.append("type = :type AND error_fingerprint = :error_fingerprint")
    return " AND ".join(conditions)


def _query(
    chosen: TaskFilter, before: Cursor | None, after: Cursor | None, limit: int, *, is_forward: bool
) -> tuple[TextClause, dict[str, Any]]:
    """Return the statement that reads a page, and its values."""
    values = {**match_values(chosen), **cursor_values(before, after), "limit": limit}
    return _page(needed_sources(chosen), is_forward=is_forward), values


def _page(sources: Sequence[Source], *, is_forward: bool) -> TextClause:
    """page: the first tasks of each index that is needed, then the first of those."""
    columns, direction = columns_of(ListedTask), "ASC" if is_forward else "DESC"
    found = " UNION ALL ".join(
        f"""
        (SELECT {columns}, {each.changed_at} AS changed_at FROM ledger.ingest_task
         WHERE {each.where} AND {MATCHES} AND {between(each)}
         ORDER BY {each.changed_at} {direction}, id {direction} LIMIT :limit)"""
        for each in sources
    )
    return sql(f"SELECT {columns} FROM ({found}) AS found ORDER BY changed_at {direction}, id {direction} LIMIT :limit")
