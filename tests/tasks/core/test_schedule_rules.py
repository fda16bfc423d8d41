"""When schedules are due: changes of daylight saving, ends of months, leap days; invalid rules are refused."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any

import pytest

from models.schedules import CatchUp
from tasks.core import registry
from tasks.core.registry import BadHandler, handler
from tasks.core.schedule_rules import rule_of
from tests.tasks.work import insert

BERLIN = "Europe/Berlin"


def at(written: str) -> datetime:
    return datetime.fromisoformat(written).replace(tzinfo=UTC)


def after(rule: str, start: str, count: int, timezone: str = "UTC") -> list[str]:
    """Return occurrences in UTC."""
    found = islice(rule_of(rule, timezone).after(at(start)), count)
    return [f"{each:%Y-%m-%d %H:%M}" for each in found]


def test_half_past_two_runs_right_after_the_gap_on_the_day_that_does_not_have_it() -> None:
    assert after("30 2 * * *", "2026-03-28", 3, BERLIN) == ["2026-03-28 01:30", "2026-03-29 01:00", "2026-03-30 00:30"]


def test_half_past_two_runs_once_on_the_day_that_has_it_twice() -> None:
    assert after("30 2 * * *", "2026-10-24", 3, BERLIN) == ["2026-10-24 00:30", "2026-10-25 00:30", "2026-10-26 01:30"]


def test_a_restart_between_two_equal_times_does_not_repeat_the_first() -> None:
    assert after("30 2 * * *", "2026-10-25 01:10", 1, BERLIN) == ["2026-10-26 01:30"]


def test_a_rule_for_every_half_hour_runs_in_both_of_two_equal_hours_and_leaves_no_hole_in_a_gap() -> None:
    assert after("*/30 * * * *", "2026-10-25 00:15", 5, BERLIN) == [
        "2026-10-25 00:30", "2026-10-25 01:00", "2026-10-25 01:30", "2026-10-25 02:00", "2026-10-25 02:30",
    ]  # fmt: skip
    assert after("*/30 * * * *", "2026-03-29 00:15", 3, BERLIN) == [
        "2026-03-29 00:30", "2026-03-29 01:00", "2026-03-29 01:30",
    ]  # fmt: skip


@pytest.mark.parametrize("day", ["2026-03-29", "2026-10-25"])
def test_an_interval_does_not_notice_that_the_clocks_change(day: str) -> None:
    start = at(day)
    found = list(islice(rule_of("every 3600s", "UTC").after(start), 5))
    assert found == [start + timedelta(hours=n) for n in (1, 2, 3, 4, 5)]


def test_an_interval_gives_the_same_times_whenever_a_process_starts() -> None:
    assert after("every 300s", "2026-11-18 07:38:59.9", 2) == ["2026-11-18 07:40", "2026-11-18 07:45"]
    assert after("every 300s", "2026-11-18 07:40:00", 1) == ["2026-11-18 07:45"]


def test_a_leap_day_waits_for_its_year() -> None:
    assert after("0 12 29 2 *", "2026-01-01", 2) == ["2028-02-29 12:00", "2032-02-29 12:00"]
    assert after("0 12 29 2 *", "2096-03-01", 1) == ["2104-02-29 12:00"]


def test_the_last_day_of_a_month_has_a_letter_and_the_31st_skips_shorter_months() -> None:
    assert after("0 0 L * *", "2026-01-31", 3) == ["2026-02-28 00:00", "2026-03-31 00:00", "2026-04-30 00:00"]
    assert after("0 0 31 * *", "2026-01-31", 3) == ["2026-03-31 00:00", "2026-05-31 00:00", "2026-07-31 00:00"]


@pytest.mark.parametrize(
    ("rule", "timezone"),
    [
        ("30 2 * * *", BERLIN), ("*/7 1-3 * * *", BERLIN), ("0 0 * * 1-5", "America/Santiago"),
        ("15,45 * * 3,4,9,10 *", "Australia/Lord_Howe"), ("0 0 1 * *", "UTC"), ("every 420s", "UTC"),
    ],
)  # fmt: skip
def test_the_next_and_the_latest_occurrence_are_the_same_wherever_one_begins_to_count(rule: str, timezone: str) -> None:
    found = list(islice(rule_of(rule, timezone).after(at("2026-03-20")), 80))
    for this, following in pairwise(found):
        for place in (this, this + (following - this) / 3, following - timedelta(microseconds=1)):
            assert next(rule_of(rule, timezone).after(place)) == following
            assert rule_of(rule, timezone).latest(found[0], place) == this


def test_the_latest_of_years_of_missed_minutes_is_found_without_counting_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, counted = rule_of("* * * 1-6 *", BERLIN), 0
    original = type(rule).after

    def counting(*arguments: Any) -> Any:
        nonlocal counted
        for each in original(*arguments):
            counted += 1
            yield each

    monkeypatch.setattr(type(rule), "after", counting)
    assert rule.latest(at("2016-01-01"), at("2026-12-25")) == at("2026-06-30 21:59")
    assert counted < 200


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"schedule": "0 0 30 2 *"}, "'Bad day-of-month'"),
        ({"schedule": "* * */20 * 1L"}, "it never occurs"),
        ({"schedule": "61 * * * *"}, "'Bad minute'"),
        ({"schedule": "9" * 5000 + " * * * *"}, "no cron expression"),
        ({"schedule": "@daily"}, "five fields"),
        ({"schedule": "0 0 3 * * *"}, "five fields"),
        ({"schedule": ""}, "five fields"),
        ({"schedule": 5}, "five fields"),
        ({"schedule": "every 5s"}, "five fields"),
        ({"schedule": "0 3 * * *", "timezone": "Europe/Berlim"}, "'Europe/Berlim' is unknown"),
        ({"schedule": "0 3 * * *", "timezone": "../../etc/passwd"}, "is unknown"),
        ({"schedule": "0 3 * * *", "timezone": ""}, "is unknown"),
        ({"schedule": "0 3 * * *", "timezone": 1}, "is unknown"),
        ({"schedule": "0 3 * * *", "every": timedelta(days=1)}, "both schedule and every"),
        ({"every": timedelta(days=1), "timezone": BERLIN}, "timezone needs schedule"),
        ({"every": timedelta(milliseconds=1500)}, "whole seconds"),
        ({"every": timedelta(0)}, "whole seconds"),
        ({"every": timedelta(days=4000)}, "whole seconds"),
        ({"every": 300}, "whole seconds"),
        ({"timezone": BERLIN}, "need a schedule or every"),
        ({"payload": {}}, "need a schedule or every"),
        ({"catch_up": "all"}, "need a schedule or every"),
        ({"every": timedelta(1), "catch_up": "twice"}, "once, all or none"),
        ({"every": timedelta(1), "catch_up": None}, "once, all or none"),
        ({"every": timedelta(1), "payload": [1]}, "payload must be an object"),
        ({"every": timedelta(1), "payload": {"a": math.nan}}, "not valid JSON"),
    ],
    ids=str,
)
def test_a_schedule_that_could_not_run_is_refused_when_it_is_declared(how: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadHandler) as refused:
        handler("test.bad", **how)(insert)
    assert refused.value.message.startswith("The handler 'test.bad' is invalid: ")
    assert sentence in refused.value.message
    assert "test.bad" not in registry._registered


def test_a_handler_keeps_what_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    handler("test.cron", schedule=" 0  3 * * mon ", timezone=BERLIN, catch_up="all", payload={"a": 1})(insert)
    handler("test.every", every=timedelta(minutes=5))(insert)
    handler("test.never")(insert)
    cron, every, never = (registry._registered[f"test.{name}"].schedule for name in ("cron", "every", "never"))
    assert cron is not None
    assert every is not None
    assert (cron.rule, cron.timezone, cron.catch_up, cron.payload) == ("0 3 * * mon", BERLIN, CatchUp.ALL, {"a": 1})
    assert (every.rule, every.timezone, every.catch_up, every.payload) == ("every 300s", "UTC", CatchUp.ONCE, {})
    assert never is None
