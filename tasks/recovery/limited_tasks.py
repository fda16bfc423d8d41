"""Repair what is lost on the way to tasks that wait for a limit (docs/protocol.md, Limits).

A waiting task is not in the index of due tasks, so `lost_wakeups.py` does not see it. For each limit with waiting
tasks, this looks at the first one, some limits in each tick:

- it has no wake-up although a place is free, or one for a time that is too late, because the limits were raised: the
  limit is looked at again, under its lock;
- its wake-up is older than a grace and lost, by the rules of `lost_wakeups.py`: it is sent again;
- its type has no limits any more: its tasks no longer wait for them, and are woken.

A limit that is used up needs nothing, however many tasks wait for it. Tasks of paused queues are left out: resuming a
queue wakes them (`tasks/operations/pauses.py`). The limits are those that workers have
registered: the worker that started last decides, as for all other settings of a type.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Final

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from models.driver_values import array
from models.sql import sql
from settings import Settings
from tasks.core import wakeups
from tasks.core.due_times import IS_PAUSED, OPEN
from tasks.core.limits import LIMITS, Limits, limit_values
from tasks.core.registered_types import registered_limits
from tasks.execution.limit_statements import MOST_WOKEN
from tasks.execution.limits import wake_waiting_for
from tasks.recovery.lost_wakeups import (
    BUDGET_SECONDS,
    HORIZON,
    IS_OVERDUE,
    PAGE,
    Depths,
    Lost,
    OverdueTask,
    QueueDepths,
)

_WAITING: Final = f"limited_at IS NOT NULL AND {OPEN}"
_IN_ORDER: Final = "ORDER BY priority DESC, limited_at, id"

# heads: the first waiting task of each of the next limits after `:type` and `:limit_key`, and what it lacks. There
# is no task if all of them are in paused queues.
HEADS: Final = sql(f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    {LIMITS},
    key (type, limit_key, number) AS (
        (SELECT type, limit_key, 1 FROM ledger.ingest_task WHERE (type, limit_key) > (:type, :limit_key) AND {_WAITING}
         ORDER BY type, limit_key LIMIT 1)
        UNION ALL
        SELECT next.type, next.limit_key, number + 1 FROM key CROSS JOIN LATERAL (
            SELECT type, limit_key FROM ledger.ingest_task
            WHERE (type, limit_key) > (key.type, key.limit_key) AND {_WAITING}
            ORDER BY type, limit_key LIMIT 1) AS next WHERE number < :most)
    SELECT task.id, task.queue, task.last_wakeup_at, horizon.passed_wakeup_at, (SELECT at FROM clock), key.type,
           key.limit_key, limits.type IS NULL AS is_unlimited,
           task.id IS NOT NULL
           AND coalesce(task.last_wakeup_at > (SELECT at FROM clock)
                        + make_interval(secs => 1 + coalesce(1 / rate, 0)), true)
           AND (max_running IS NULL OR max_running > (
               SELECT count(*) FROM ledger.ingest_task running
               WHERE running.type = key.type AND running.limit_key = key.limit_key AND status = 'RUNNING'))
           AS is_stalled,
           coalesce({IS_OVERDUE}, false) AS is_overdue
    FROM key LEFT JOIN LATERAL (
        SELECT * FROM ledger.ingest_task waiting
        WHERE waiting.type = key.type AND waiting.limit_key = key.limit_key AND {_WAITING} AND NOT {IS_PAUSED}
        {_IN_ORDER} LIMIT 1) AS task ON true
    LEFT JOIN limits ON limits.type = key.type {HORIZON}
    ORDER BY key.type, key.limit_key
""")
# overdue: of the first waiting tasks of each of these limits, those whose wake-up is overdue.
OVERDUE: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at)
    SELECT task.id FROM unnest(CAST(:key_types AS text[]), CAST(:limit_keys AS text[])) AS key(type, limit_key)
    CROSS JOIN LATERAL (
        SELECT * FROM ledger.ingest_task waiting
        WHERE waiting.type = key.type AND waiting.limit_key = key.limit_key AND {_WAITING} AND NOT {IS_PAUSED}
        {_IN_ORDER} LIMIT {MOST_WOKEN}) AS task
    WHERE {IS_OVERDUE}
""")
# stop_waiting: QUEUED|RETRYING, waiting for a limit → unchanged, due, with a wake-up: its type has no limits any more.
STOP_WAITING: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    held AS MATERIALIZED (
        SELECT id FROM ledger.ingest_task WHERE id = ANY(ARRAY(
            SELECT id FROM ledger.ingest_task WHERE type = :type AND {_WAITING} ORDER BY limit_key LIMIT :most))
        ORDER BY id FOR NO KEY UPDATE SKIP LOCKED),
    back AS (
        UPDATE ledger.ingest_task task SET limited_at = NULL, last_wakeup_at = at, updated_at = at
        FROM held, clock WHERE task.id = held.id
        RETURNING task.id, type, queue, priority, isolated, CAST(NULL AS timestamptz) AS due_at),
    {wakeups.insert_wakeups("back")}
    SELECT (SELECT count(*) FROM back) AS woken, ours FROM wakeups
""")


def repair(engine: Engine, settings: Settings, *, depths: Depths, lost: Lost | None = None) -> int:
    """Wake tasks that still wait although their limit has room; return their number.

    The arguments are those of `lost_wakeups.repair`. One call looks at PAGE limits; the next one continues, and starts
    again after the last limit.
    """
    give_up_at = time.monotonic() + BUDGET_SECONDS
    with Session(engine) as db:
        limits = registered_limits(db.connection())
        heads = _next_heads(db, limits, settings)
        db.commit()
    if not heads:
        return 0
    overdue = [OverdueTask(*row[:5]) for row in heads if row.is_overdue and not row.is_unlimited]
    chosen = lost(overdue, settings) if lost and overdue else QueueDepths(depths).choose(overdue)
    ids = {each.id for each in chosen}
    with Session(engine) as db:
        stalled = [(row.type, row.limit_key) for row in heads if row.is_stalled and not row.is_unlimited]
        woken = wake_waiting_for(db, stalled, limits=limits) if stalled else 0
        woken += _wake_again(db, [row for row in heads if row.id in ids], settings)
        db.commit()
    for type_ in sorted({row.type for row in heads if row.is_unlimited}):
        woken += _stop_waiting(engine, type_, settings, give_up_at)
    return woken


def _next_heads(db: Session, limits: Collection[Limits], settings: Settings) -> Sequence[Any]:
    values = {"grace": settings.ingest_wakeup_grace_ms / 1000, "most": PAGE, **limit_values(limits)}
    rows = db.execute(HEADS, {**values, **_scan}).all()
    is_last_page = len(rows) < PAGE
    _scan["type"], _scan["limit_key"] = ("", "") if is_last_page else (rows[-1].type, rows[-1].limit_key)
    return rows


def _wake_again(db: Session, heads: Sequence[Any], settings: Settings) -> int:
    """Send the wake-ups of these limits again that are overdue."""
    if not heads:
        return 0
    keys = {"key_types": array(row.type for row in heads), "limit_keys": array(row.limit_key for row in heads)}
    ids = db.execute(OVERDUE, {"grace": settings.ingest_wakeup_grace_ms / 1000, **keys}).scalars().all()
    return wakeups.wake_again(db, ids, queues={row.queue for row in heads}).tasks


def _stop_waiting(engine: Engine, type: str, settings: Settings, give_up_at: float) -> int:
    woken = 0
    while time.monotonic() < give_up_at:
        with Session(engine) as db:
            values = wakeups.wakeup_values(db, settings.ingest_queues)
            row = db.execute(STOP_WAITING, {"type": type, "most": PAGE, **values}).one()
            wakeups.publish_after_commit(db, row.ours)
            db.commit()
        woken += row.woken
        if row.woken < PAGE:
            break
    return woken


_scan: Final = {"type": "", "limit_key": ""}  # the last limit that this process has looked at
