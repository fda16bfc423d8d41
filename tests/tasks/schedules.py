"""Declare schedules as a starting worker does, set the ledger's clock, and read what became of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from models import clock
from models.engine import engine
from models.sql import sql
from tasks.core.registered_types import Registration
from tasks.core.schedule_rules import declared
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.registrations import handler_of, registered
from tests.tasks.work import rows


def scheduled(
    type: str = "test.hourly",
    schedule: str | None = "0 * * * *",
    *,
    name: str = "another:1",
    every: Any = None,
    timezone: str | None = None,
    catch_up: str = "once",
    payload: Any = None,
    **how: Any,
) -> Registration:
    """Register a worker that has one handler with a schedule, which this process does not have."""
    made = declared(schedule if every is None else None, every, timezone, catch_up, payload)
    return registered(handler_of(type, schedule=made, **how), name=name)


def renew(registration: Registration) -> None:
    """Give a sign of life of the worker, as it does every few seconds."""
    registration._due_at = 0.0
    registration.tick()


def set_clock(stack: ServersOfTests, written: str) -> None:
    """Set the ledger's clock to a time in UTC."""
    with engine().connect() as connection:
        now = clock.now(connection)
    move(stack, (datetime.fromisoformat(written).replace(tzinfo=UTC) - now).total_seconds())


def row(name: str = "test.hourly") -> dict[str, Any]:
    with engine().connect() as connection:
        found = connection.execute(sql("SELECT * FROM ledger.schedule WHERE name = :name"), {"name": name})
        return dict(found.mappings().one())


def next_at(name: str = "test.hourly") -> str:
    at = row(name)["next_at"]
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M}" if at else ""


def periods(type: str = "test.hourly") -> list[str]:
    """Return the periods of the occurrences that are tasks."""
    return sorted(period for (period,) in rows("payload->>'scheduledFor'", "type = :type", type=type))
