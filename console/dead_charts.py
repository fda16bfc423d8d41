"""The charts of dead letters: how many tasks of a group died in each hour or day."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal

from console.charts import Chart, draw_ended
from console.history import STEPS, History, Period, Step
from tasks.operations.dead_groups import Deaths

PERIODS: Final = (Period.HOURS, Period.DAYS)
SPANS: Final[dict[Period, Literal["hour", "day"]]] = {Period.HOURS: "hour", Period.DAYS: "day"}


def begin(period: Period, now: datetime) -> datetime:
    """Return when the first hour or day of a period begins (UTC)."""
    last = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    if period is Period.DAYS:
        last = last.replace(hour=0)
    return last - (STEPS[period].count - 1) * STEPS[period].length


def draw(deaths: Deaths, period: Period, now: datetime) -> Chart:
    """Return the chart of a group."""
    first, how = begin(period, now), STEPS[period]
    steps = [Step(first + number * how.length) for number in range(how.count)]
    for step in steps:
        step.counts["dead"] = deaths.counts.get(step.start, 0)
    return draw_ended(History(period, steps))
