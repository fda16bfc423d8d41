"""Schedules as operators see them: list, pause, resume, and run one now."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Connection, Engine, Row

from models.errors import CeleriacError, shorten
from models.sql import sql
from outbox.after_commit import begin
from tasks.core.registered_types import IS_LIVE
from tasks.core.schedule_rules import rule_of
from tasks.submission.occurrences import occurrence
from tasks.submission.submit import Submitted, id_of, submit_many

LIST: Final = sql(f"""
    SELECT name, type, rule, timezone, catch_up, payload, next_at, last_at, paused_by, paused_reason, paused_at,
           error, ARRAY(SELECT worker FROM ledger.task_worker WHERE schedule.type = ANY(types) AND {IS_LIVE}
                        ORDER BY worker) AS workers
    FROM ledger.schedule ORDER BY name
""")
STATUSES: Final = sql("SELECT id, status FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[]))")
LOCK: Final = sql("""
    SELECT name, type, rule, timezone, payload, next_at, last_at, paused, ledger.ledger_now() AS now
    FROM ledger.schedule WHERE name = :name FOR UPDATE
""")
# pause: → paused; an operator who pauses it again replaces name and reason.
PAUSE: Final = sql("""
    UPDATE ledger.schedule
    SET paused = true, paused_by = :actor, paused_reason = :reason, paused_at = (SELECT ledger.ledger_now())
    WHERE name = :name
""")
# resume: paused → not paused.
RESUME: Final = sql("""
    UPDATE ledger.schedule
    SET paused = false, paused_by = NULL, paused_reason = NULL, paused_at = NULL, next_at = :next_at
    WHERE name = :name
""")


class UnknownSchedule(CeleriacError):
    """There is no such schedule.

    No worker has declared a schedule with this name. The name of a schedule is the type of its handler.
    """

    code = "unknown_schedule"
    remedy = "`manage.py schedules` lists the names."
    http_status = 404


class ScheduleState(StrEnum):
    """Whether a schedule runs, and why not."""

    ACTIVE = "active"
    PAUSED = "paused"
    FAILING = "failing"  # its due occurrence cannot be submitted; `error` says why
    NO_WORKER = "no worker"  # no live worker has its handler
    REMOVED = "removed"  # the handler no longer has a schedule


@dataclass(frozen=True, slots=True)
class ListedSchedule:
    """A schedule, its next period, and the task of its last one."""

    name: str
    type: str
    rule: str
    timezone: str
    catch_up: str
    payload: dict[str, Any]
    state: ScheduleState
    next_at: datetime | None
    last_at: datetime | None
    last_task_id: uuid.UUID | None
    last_status: str | None  # None: nothing has run yet, or the task was pruned
    paused_by: str | None
    paused_reason: str | None
    paused_at: datetime | None
    error: str | None
    workers: list[str]


def list_schedules(connection: Connection) -> list[ListedSchedule]:
    """Return all schedules by name."""
    rows = connection.execute(LIST).all()
    ids = {row.name: _task_id(row, row.last_at) for row in rows if row.last_at is not None}
    statuses = {row.id: row.status for row in connection.execute(STATUSES, {"ids": list(ids.values())})}
    return [
        ListedSchedule(
            **row._mapping, state=_state(row), last_task_id=(id_ := ids.get(row.name)), last_status=statuses.get(id_)
        )
        for row in rows
    ]


def pause(connection: Connection, name: str, *, actor: str, reason: str | None = None) -> None:
    """Submit no further occurrences until `resume`. Tasks that exist already run."""
    _lock(connection, name)
    connection.execute(PAUSE, {"name": name, "actor": actor, "reason": reason})


def resume(connection: Connection, name: str) -> datetime | None:
    """End a pause and return the next period. Periods that passed during the pause do not run."""
    found = _lock(connection, name)
    next_at: datetime | None = found.next_at
    if found.paused and next_at is not None and next_at <= found.now:
        start = max(found.now, found.last_at or found.now)
        next_at = next(rule_of(found.rule, found.timezone).after(start.astimezone(UTC)))
    connection.execute(RESUME, {"name": name, "next_at": next_at})
    return next_at


def run_now(engine: Engine, name: str, *, actor: str) -> Submitted:
    """Submit one occurrence now, beside the periods: none of them is replaced. A paused schedule can be run, too."""
    with begin(engine) as connection:
        found = _lock(connection, name)
        new = occurrence(name, found.type, found.payload, found.now.astimezone(UTC))
        (submitted,) = submit_many(connection, [replace(new, key=None, context={**new.context, "user": actor})])
        return submitted


def _lock(connection: Connection, name: str) -> Row[Any]:
    found = connection.execute(LOCK, {"name": name}).first()
    if found is None:
        raise UnknownSchedule(f"There is no schedule {shorten(name)}. {UnknownSchedule.remedy}")
    return found


def _task_id(row: Row[Any], at: datetime) -> uuid.UUID:
    return id_of(occurrence(row.name, row.type, row.payload, at.astimezone(UTC)))


def _state(row: Row[Any]) -> ScheduleState:
    if row.next_at is None:
        return ScheduleState.REMOVED
    if row.paused_at is not None:
        return ScheduleState.PAUSED
    if not row.workers:
        return ScheduleState.NO_WORKER
    return ScheduleState.ACTIVE if row.error is None else ScheduleState.FAILING
