"""Submit the occurrences of schedules that are due: the tick `schedules`.

One transaction per schedule locks its row, submits its due occurrences as tasks, and moves `next_at` forward. So an
occurrence is a task if and only if `next_at` has passed it, whatever dies meanwhile. Ticks that run at the same time
skip the rows that others have locked. In addition, the idempotency key of an occurrence is made of schedule and period.

A schedule that cannot be submitted, because its queue does not accept tasks or this machine does not know its time
zone, stores the reason in its row, stays due, and does not stop the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, islice, takewhile
from typing import Any, Final

from sqlalchemy import Connection, Engine, Row

from failpoint import failpoint
from models.ledger_outage import is_outage
from models.schedules import CatchUp
from models.sql import sql
from outbox.after_commit import begin
from tasks.core.outcomes import Failure
from tasks.core.registered_types import IS_LIVE
from tasks.core.schedule_rules import Rule, rule_of
from tasks.submission.envelope import NewTask, check_task
from tasks.submission.submit import Submitted, id_of, submit_each

logger = logging.getLogger(__name__)

PAGE: Final = 1000  # occurrences of one schedule in one transaction
PUNCTUAL: Final = timedelta(minutes=1)  # an occurrence that is later than this was missed

# lock_due: the first due schedule after a name that is not paused, and whose handler a live worker has → locked.
LOCK_DUE: Final = sql(f"""
    SELECT name, type, rule, timezone, catch_up, payload, next_at, (SELECT ledger.ledger_now()) AS now
    FROM ledger.schedule
    WHERE next_at <= (SELECT ledger.ledger_now()) AND NOT paused AND name > :after
      AND EXISTS (SELECT FROM ledger.task_worker WHERE schedule.type = ANY(types) AND {IS_LIVE})
    ORDER BY name LIMIT 1 FOR UPDATE OF schedule SKIP LOCKED
""")
# advance: due → waiting for its next occurrence. `last_at` is the last period that became a task.
ADVANCE: Final = sql("""
    UPDATE ledger.schedule SET next_at = :next_at, last_at = coalesce(:last_at, last_at), error = NULL
    WHERE name = :name AND next_at < :next_at
""")
FAIL: Final = sql("""
    UPDATE ledger.schedule SET error = :error WHERE name = :name AND error IS DISTINCT FROM :error
""")


@dataclass(frozen=True, slots=True)
class Ticked:
    """What a tick has done: occurrences that became tasks, and schedules that could not be submitted."""

    submitted: int
    failed: int


def submit_due(engine: Engine, *, budget_seconds: float = 5.0) -> Ticked:
    """Submit until nothing is due or the time is over. Every schedule gets one page before one gets a second."""
    deadline = time.monotonic() + budget_seconds
    total, failed, name, in_this_round = 0, set[str](), "", 0
    while time.monotonic() < deadline:
        page = _submit_next(engine, after=name)
        if page is None:
            if not in_this_round:
                break
            name, in_this_round = "", 0
            continue
        failpoint("schedules.after_commit")
        name = page.name
        in_this_round += page.submitted
        total += page.submitted
        if page.has_failed:
            failed.add(name)
    return Ticked(total, len(failed))


def occurrence(name: str, type: str, payload: Mapping[str, Any], at: datetime) -> NewTask:
    """Return the task of one period."""
    period = f"{at:%Y-%m-%dT%H:%M:%SZ}"
    context = {"schedule": name}
    return NewTask(type, {**payload, "scheduledFor": period}, key=f"schedule:{name}:{period}", context=context)


@dataclass(frozen=True, slots=True)
class _Page:
    name: str
    submitted: int
    has_failed: bool = False


def _submit_next(engine: Engine, *, after: str) -> _Page | None:
    """Submit a page of the first due schedule after this name, or return None if there is none."""
    name = None
    try:
        with begin(engine) as connection:
            due = connection.execute(LOCK_DUE, {"after": after}).first()
            if due is None:
                return None
            name = due.name
            return _Page(name, _submit_page(connection, due))
    except Exception as error:
        if name is None or is_outage(error):
            raise
        _record(engine, name, error)
        return _Page(name, 0, has_failed=True)


def _submit_page(connection: Connection, due: Row[Any]) -> int:
    first, now = due.next_at.astimezone(UTC), due.now.astimezone(UTC)
    rule = rule_of(due.rule, due.timezone)
    passed, periods = _choose(CatchUp(due.catch_up), rule, first, now)
    new = [occurrence(due.name, due.type, due.payload, at) for at in periods]
    found = submit_each(connection, [(id_of(each), check_task(each)) for each in new]) if new else []
    failpoint("schedules.after_submit")
    values = {"name": due.name, "next_at": next(rule.after(passed)), "last_at": periods[-1] if periods else None}
    connection.execute(ADVANCE, values)
    return sum(isinstance(each, Submitted) and each.created for each in found)


def _choose(catch_up: CatchUp, rule: Rule, first: datetime, now: datetime) -> tuple[datetime, list[datetime]]:
    """Return how far the schedule has come after this page, and the periods to submit."""
    if catch_up is CatchUp.ALL:
        due = chain([first], takewhile(lambda at: at <= now, rule.after(first)))
        page = list(islice(due, PAGE))
        return page[-1], page
    latest = rule.latest(first, now)
    is_missed = catch_up is CatchUp.NONE and now - latest > PUNCTUAL
    return latest, [] if is_missed else [latest]


def _record(engine: Engine, name: str, error: Exception) -> None:
    """Store the reason, and log it once."""
    message = Failure.of(error).message
    with engine.begin() as connection:
        is_new = connection.execute(FAIL, {"name": name, "error": message}).rowcount
    if is_new:
        logger.warning("The schedule %s cannot be submitted: %s", name, message, extra={"event": "schedule_failed"})
