"""Workers declare schedules in the ledger; which declaration wins, and what becomes of a schedule without a worker."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from models.engine import engine
from models.sql import sql
from tasks.core.registered_types import FORGET_DAYS
from tasks.operations.schedules import pause
from tasks.submission.occurrences import submit_due
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.registrations import handler_of, registered
from tests.tasks.schedules import next_at, periods, renew, row, scheduled, set_clock

pytestmark = pytest.mark.usefixtures("ledger")


def names() -> list[str]:
    with engine().connect() as connection:
        return list(connection.execute(sql("SELECT name FROM ledger.schedule ORDER BY name")).scalars())


def test_a_new_schedule_begins_with_its_next_period(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:20:00")
    scheduled(timezone="Asia/Kolkata", catch_up="all", payload={"a": 1})  # half an hour beside UTC
    found = row()
    assert next_at() == "2026-11-18 07:30"
    assert (found["type"], found["rule"], found["timezone"]) == ("test.hourly", "0 * * * *", "Asia/Kolkata")
    assert (found["catch_up"], found["payload"], found["paused"]) == ("all", {"a": 1}, False)


def test_a_restart_with_the_same_rule_keeps_the_missed_period_and_changes_the_rest(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:20:00")
    scheduled()
    set_clock(ledger, "2026-11-18 09:20:00")
    scheduled(catch_up="all", payload={"a": 1}, name="another:2")
    assert (next_at(), row()["catch_up"], row()["payload"]) == ("2026-11-18 08:00", "all", {"a": 1})


@pytest.mark.parametrize(
    ("changed", "following"),
    [
        ({"schedule": "30 * * * *"}, "2026-11-18 09:30"),
        ({"timezone": "Asia/Kolkata"}, "2026-11-18 09:30"),
        ({"every": timedelta(minutes=10)}, "2026-11-18 09:20"),
    ],
    ids=str,
)
def test_another_rule_begins_with_its_next_period(
    ledger: ServersOfTests, changed: dict[str, Any], following: str
) -> None:
    set_clock(ledger, "2026-11-18 07:15:00")
    scheduled()
    set_clock(ledger, "2026-11-18 09:15:00")
    scheduled(**changed, name="another:2")
    assert next_at() == following
    submit_due(engine())
    assert periods() == []


def test_an_old_worker_that_registers_again_during_a_deployment_changes_nothing(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:15:00")
    gone = registered(handler_of("test.hourly"), name="another:0")  # the version before had no schedule
    old = scheduled(name="another:1")
    new = scheduled(schedule="30 * * * *", name="another:2")
    for _ in range(3):
        move(ledger, 60)  # their rows are old: each deletes those of the others, and all register again
        for worker in (new, old, gone):
            renew(worker)
        assert (row()["rule"], next_at()) == ("30 * * * *", "2026-11-18 07:30")


def test_a_handler_that_loses_its_schedule_stops_it_and_gets_it_back_later(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:15:00")
    old = scheduled(catch_up="all")
    registered(handler_of("test.hourly"), name="another:2")
    registered(handler_of("test.other"), name="another:3")  # knows nothing about it
    assert next_at() == ""
    set_clock(ledger, "2026-11-18 08:30:00")
    renew(old)
    assert (submit_due(engine()).submitted, next_at()) == (0, "")
    scheduled(catch_up="all", name="another:4")
    assert next_at() == "2026-11-18 09:00"


def test_a_schedule_is_forgotten_a_month_after_it_was_removed_or_its_last_worker_ended(ledger: ServersOfTests) -> None:
    scheduled("test.removed")
    scheduled("test.gone", name="another:2")
    scheduled("test.kept", name="another:3")
    running = registered(handler_of("test.removed"), name="another:4")
    assert names() == ["test.gone", "test.kept", "test.removed"]
    move(ledger, (FORGET_DAYS + 1) * 86_400)
    renew(running)  # its type is not forgotten, so it is not the reason
    scheduled("test.kept", name="another:5")
    assert names() == ["test.kept"]


def test_a_pause_outlives_a_restart_and_another_rule(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:15:00")
    scheduled()
    with engine().begin() as connection:
        pause(connection, "test.hourly", actor="ann@desk", reason="later")
    scheduled(schedule="30 * * * *", name="another:2")
    set_clock(ledger, "2026-11-18 07:45:00")
    scheduled(schedule="30 * * * *", name="another:3")
    assert (submit_due(engine()).submitted, row()["paused_by"]) == (0, "ann@desk")


def test_a_clock_that_was_set_back_does_not_bring_a_period_back(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:59:30")
    scheduled()
    move(ledger, 31)
    submit_due(engine())
    move(ledger, -1800)
    with engine().begin() as connection:  # the new worker is the later one, although the clock says otherwise
        connection.execute(sql("UPDATE ledger.schedule SET declared_at = '2026-01-01'"))
    scheduled(schedule="*/20 * * * *", name="another:2")
    assert next_at() == "2026-11-18 08:20"
