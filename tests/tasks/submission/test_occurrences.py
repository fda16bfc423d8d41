"""The tick `schedules`: each period becomes one task, whatever is repeated, missed or killed."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from sqlalchemy.exc import OperationalError

from models.engine import engine
from models.sql import sql
from tasks import submit, ticks
from tasks.core.registered_types import LIVE_SECONDS
from tasks.operations.schedules import ScheduleState, list_schedules
from tasks.submission import occurrences
from tasks.submission.occurrences import Ticked, submit_due
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import raising, statements
from tests.tasks.lost_workers import start_child
from tests.tasks.pausing import pause, resume
from tests.tasks.schedules import next_at, periods, renew, row, scheduled, set_clock
from tests.tasks.work import rows

pytestmark = pytest.mark.usefixtures("ledger")


def tick() -> int:
    return submit_due(engine()).submitted


def tick_only() -> None:
    tick()


def test_a_period_becomes_a_task_when_it_is_due_and_not_before(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:59:30")
    scheduled(payload={"kind": "full"}, priority=7)
    assert (tick(), rows()) == (0, [])
    move(ledger, 31)
    assert ticks.run("schedules") == {"submitted": 1, "failed": 0}
    assert rows("type, idempotency_key, payload, context, priority, status") == [
        (
            "test.hourly",
            "schedule:test.hourly:2026-11-18T08:00:00Z",
            {"kind": "full", "scheduledFor": "2026-11-18T08:00:00Z"},
            {"schedule": "test.hourly"},
            7,
            "QUEUED",
        )
    ]
    assert next_at() == "2026-11-18 09:00"
    assert (tick(), len(rows())) == (0, 1)


def test_a_tick_without_a_due_schedule_is_one_statement(ledger: ServersOfTests) -> None:
    scheduled()
    tick()
    with statements() as executed:
        assert submit_due(engine()) == Ticked(0, 0)
    assert len(executed) == 1


def test_ticks_that_run_at_the_same_moment_submit_each_period_once(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:59:30")
    workers = [scheduled(f"test.{n}", catch_up="all", name=f"another:{n}") for n in range(5)]
    move(ledger, 7200)
    for worker in workers:
        renew(worker)
    children = [start_child(tick_only) for _ in range(4)]
    tick()
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    tick()
    expected = ["2026-11-18T08:00:00Z", "2026-11-18T09:00:00Z"]
    assert [periods(f"test.{n}") for n in range(5)] == [expected] * 5


@pytest.mark.parametrize(("place", "count"), [("schedules.after_submit", 0), ("schedules.after_commit", 1)])
def test_a_tick_that_is_killed_leaves_the_period_either_due_or_done(
    ledger: ServersOfTests, place: str, count: int
) -> None:
    set_clock(ledger, "2026-11-18 07:59:30")
    scheduled()
    move(ledger, 31)
    pid = start_child(tick_only, failpoints=f"{place}=kill")
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert len(rows()) == count
    tick()
    assert periods() == ["2026-11-18T08:00:00Z"]
    assert next_at() == "2026-11-18 09:00"


def test_a_period_whose_task_and_tombstone_are_gone_does_not_run_again(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:59:30")
    scheduled()
    move(ledger, 31)
    tick()
    with engine().begin() as connection:
        connection.execute(sql("DELETE FROM ledger.ingest_task"))
    assert tick() == 0
    scheduled(schedule="*/30 * * * *", name="another:2")
    assert (tick(), next_at()) == (0, "2026-11-18 08:30")


def test_a_period_that_is_due_once_more_finds_its_task(ledger: ServersOfTests) -> None:
    """As after a restored backup of the table."""
    set_clock(ledger, "2026-11-18 07:59:30")
    scheduled()
    move(ledger, 31)
    assert tick() == 1
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.schedule SET next_at = last_at, last_at = NULL, payload = '{\"a\": 1}'"))
    assert (tick(), len(rows()), next_at()) == (0, 1, "2026-11-18 09:00")


@pytest.mark.parametrize(
    ("catch_up", "late", "on_time"),
    [
        ("once", ["12:00"], ["12:00", "13:00"]),
        ("all", ["08:00", "09:00", "10:00", "11:00", "12:00"], ["08:00", "09:00", "10:00", "11:00", "12:00", "13:00"]),
        ("none", [], ["13:00"]),
    ],
)
def test_missed_periods_are_caught_up_as_the_handler_says(
    ledger: ServersOfTests, catch_up: str, late: list[str], on_time: list[str]
) -> None:
    set_clock(ledger, "2026-11-18 07:30:00")
    worker = scheduled(catch_up=catch_up)
    set_clock(ledger, "2026-11-18 12:20:00")
    renew(worker)
    tick()
    assert [period[11:16] for period in periods()] == late
    assert next_at() == "2026-11-18 13:00"
    set_clock(ledger, "2026-11-18 13:00:30")
    renew(worker)
    tick()
    assert [period[11:16] for period in periods()] == on_time


def test_a_long_catch_up_neither_delays_the_others_nor_exceeds_its_time(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(occurrences, "PAGE", 10)
    set_clock(ledger, "2026-11-18 07:30:00")
    minutely = scheduled("test.a", "* * * * *", catch_up="all")
    hourly = scheduled("test.b", name="another:2")
    set_clock(ledger, "2026-11-18 07:55:00")
    for worker in (minutely, hourly):
        renew(worker)
    assert submit_due(engine(), budget_seconds=0) == Ticked(0, 0)
    set_clock(ledger, "2026-11-18 08:00:01")
    for worker in (minutely, hourly):
        renew(worker)
    assert tick() == 31
    order = [type for (type,) in rows("type", "true")]
    assert order.index("test.b") <= 10
    assert len(periods("test.a")) == len(set(periods("test.a"))) == 30


def test_a_schedule_waits_while_no_live_worker_has_its_handler(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:59:00")
    worker = scheduled()
    move(ledger, LIVE_SECONDS + 30)
    assert (tick(), periods()) == (0, [])
    renew(worker)
    assert (tick(), periods()) == (1, ["2026-11-18T08:00:00Z"])


def test_a_schedule_that_cannot_be_submitted_says_why_stays_due_and_does_not_stop_the_others(
    ledger: ServersOfTests, caplog: pytest.LogCaptureFixture
) -> None:
    set_clock(ledger, "2026-11-18 07:59:30")
    scheduled("test.a", queue="no-such-queue")
    scheduled("test.b", timezone="Europe/Berlin", name="another:2")
    scheduled("test.c", name="another:3")
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.schedule SET timezone = 'Moon/Tycho' WHERE name = 'test.b'"))
    move(ledger, 31)
    assert submit_due(engine()) == Ticked(1, 2)
    assert submit_due(engine()) == Ticked(0, 2)
    assert periods("test.c") == ["2026-11-18T08:00:00Z"]
    assert "UnknownQueue: There is no queue 'no-such-queue'" in row("test.a")["error"]
    assert "the time zone 'Moon/Tycho' is unknown here" in row("test.b")["error"]
    assert len(caplog.records) == 2
    scheduled("test.a", name="another:4")
    assert (tick(), row("test.a")["error"], periods("test.a")) == (1, None, ["2026-11-18T08:00:00Z"])


def test_a_schedule_whose_queue_takes_no_new_tasks_catches_up_when_it_does_again(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:59:30")
    worker = scheduled(catch_up="all")
    pause(intake=True, reason="a move")
    for _ in range(2):
        move(ledger, 3600)
        renew(worker)
        assert submit_due(engine()) == Ticked(0, 1)
    with engine().connect() as connection:
        (shown,) = list_schedules(connection)
    assert shown.state is ScheduleState.FAILING
    assert "op@here has paused its intake: a move" in (shown.error or "")
    resume()
    assert (tick(), row()["error"]) == (2, None)
    assert periods() == ["2026-11-18T08:00:00Z", "2026-11-18T09:00:00Z"]


def test_an_outage_of_the_ledger_fails_the_tick_instead_of_being_blamed_on_a_schedule(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(ledger, "2026-11-18 07:59:30")
    scheduled()
    move(ledger, 31)
    outage = OperationalError("", None, Exception("server closed the connection"), connection_invalidated=True)
    monkeypatch.setattr(occurrences, "is_outage", lambda error: error is outage)
    monkeypatch.setattr(occurrences, "submit_each", raising(outage))
    with pytest.raises(OperationalError):
        ticks.run("schedules")
    assert (row()["error"], periods()) == (None, [])


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("2026-10-24 12:00:00", ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]),
        ("2026-03-28 12:00:00", ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]),
    ],
    ids=["exists twice", "does not exist"],
)
def test_half_past_two_runs_once_a_day_while_the_clocks_change(
    ledger: ServersOfTests, start: str, expected: list[str]
) -> None:
    """The clock of the ledger passes in steps of 40 minutes, and the worker starts again at each step."""
    set_clock(ledger, start)
    for number in range(60):
        scheduled(schedule="30 2 * * *", timezone="Europe/Berlin", name=f"another:{number % 2}")
        tick()
        move(ledger, 2400)
    assert periods() == expected


def test_an_interval_shorter_than_the_tick_skips_no_period_that_is_to_be_caught_up(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 08:00:00.5")
    scheduled("test.second", every=timedelta(seconds=1), catch_up="all")
    for _ in range(3):
        move(ledger, 2.5)
        tick()
    seconds = [int(period[17:19]) for period in periods("test.second")]
    assert seconds == list(range(seconds[0], seconds[-1] + 1))
    assert len(seconds) >= 7


def test_a_task_that_has_the_key_of_a_period_already_is_not_repeated(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:59:30")
    scheduled()
    submit(engine(), "test.hourly", {"other": 1}, key="schedule:test.hourly:2026-11-18T08:00:00Z")
    move(ledger, 31)
    assert (tick(), len(rows()), next_at()) == (0, 1, "2026-11-18 09:00")
