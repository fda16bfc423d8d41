"""What workers have declared about schedules, in the table `schedule`.

A worker writes the schedules of its handlers when it starts (`registered_types.py`). The worker that started last
decides: an older one that registers again, because it was cut off from the ledger, changes nothing. So two versions
that run side by side during a deployment do not take turns.

    a new schedule, or another rule or time zone ──► next_at is its first occurrence from now on
    the same rule and time zone                  ──► next_at stays, and missed periods are caught up
    a handler that no longer has a schedule      ──► next_at is NULL: nothing runs, and it is forgotten after a month

A schedule runs only while a live worker has its handler. A pause stays until an operator ends it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection

from models.driver_values import array
from models.sql import sql
from outbox.canonical_json import canonical_json
from tasks.core.schedule_rules import Schedule, rule_of

NOW: Final = sql("SELECT ledger.ledger_now()")
# All schedules of the worker's types are locked in one order, so that two workers do not deadlock.
LAST: Final = sql("""
    SELECT name, last_at FROM ledger.schedule WHERE type = ANY(CAST(:types AS text[])) ORDER BY name FOR UPDATE
""")
# declare: → as this worker declares it, unless a worker that started later has declared it.
DECLARE: Final = sql("""
    INSERT INTO ledger.schedule AS old (name, type, rule, timezone, catch_up, payload, next_at, declared_at)
    SELECT name, name, rule, timezone, catch_up, payload, next_at, :declared_at
    FROM unnest(CAST(:names AS text[]), CAST(:rules AS text[]), CAST(:timezones AS text[]), CAST(:catch_ups AS text[]),
                CAST(:payloads AS jsonb[]), CAST(:next_ats AS timestamptz[]))
         AS given(name, rule, timezone, catch_up, payload, next_at) ORDER BY name
    ON CONFLICT (name) DO UPDATE
    SET rule = excluded.rule, timezone = excluded.timezone, catch_up = excluded.catch_up, payload = excluded.payload,
        next_at = CASE WHEN (old.rule, old.timezone) = (excluded.rule, excluded.timezone)
                       THEN coalesce(old.next_at, excluded.next_at) ELSE excluded.next_at END,
        error = NULL, declared_at = excluded.declared_at
    WHERE old.declared_at <= excluded.declared_at
""")
# withdraw: the handlers that this worker has without a schedule → nothing runs.
WITHDRAW: Final = sql("""
    UPDATE ledger.schedule SET next_at = NULL, error = NULL, declared_at = :declared_at
    WHERE type = ANY(CAST(:types AS text[])) AND name <> ALL(CAST(:names AS text[]))
      AND next_at IS NOT NULL AND declared_at <= :declared_at
""")
# forget: without a schedule for long, or of a type that was forgotten → deleted.
FORGET: Final = sql("""
    DELETE FROM ledger.schedule WHERE name IN (
        SELECT name FROM ledger.schedule
        WHERE (next_at IS NULL AND declared_at < (SELECT ledger.ledger_now()) - make_interval(days => :days))
           OR type NOT IN (SELECT type FROM ledger.task_type)
        FOR UPDATE SKIP LOCKED)
""")


def declare(
    connection: Connection,
    schedules: Mapping[str, Schedule],
    *,
    types: Collection[str],
    declared_at: datetime | None,
    forget_days: int,
) -> datetime:
    """Write the schedules of a worker that knows these types, and return when it declared them first.

    `declared_at` is what an earlier call of the same worker has returned, or None.
    """
    now: datetime = connection.execute(NOW).scalar_one().astimezone(UTC)
    names = sorted(schedules)
    values = {"declared_at": declared_at or now, "names": array(names), "types": array(sorted(types))}
    last = {name: at.astimezone(UTC) for name, at in connection.execute(LAST, values) if at is not None}
    connection.execute(WITHDRAW, values)
    connection.execute(FORGET, {"days": forget_days})
    if names:
        given = [schedules[name] for name in names]
        starts = [max(now, last.get(name, now)) for name in names]  # a clock that was set back repeats no period
        next_ats = [next(rule_of(each.rule, each.timezone).after(at)) for each, at in zip(given, starts, strict=True)]
        values |= {
            "rules": array(each.rule for each in given),
            "timezones": array(each.timezone for each in given),
            "catch_ups": array(each.catch_up for each in given),
            "payloads": array(canonical_json(each.payload) for each in given),
            "next_ats": array(next_ats),
        }
        connection.execute(DECLARE, values)
    return declared_at or now
