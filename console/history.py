"""The history that the charts show: how many tasks ended how, and how long they waited and ran, from the tally."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from models.clock import now
from models.engine import engine
from tally.histograms import add
from tally.totals import Span, read_summed_history

# What becomes of tasks, in the order in which charts stack it. Other results say that nothing has ended.
RESULTS: Final = ("succeeded", "retry", "discarded", "dead")


class Period(StrEnum):
    """How far back the charts go: the word in the address."""

    MINUTES = "15m"
    HOURS = "24h"
    DAYS = "30d"


@dataclass(frozen=True, slots=True)
class Steps:
    """How a period is divided, and how its times are written."""

    name: str
    span: Span
    length: timedelta
    count: int
    time_format: str


STEPS: Final = {
    Period.MINUTES: Steps("15 minutes", "minute", timedelta(minutes=1), 15, "%H:%M"),
    Period.HOURS: Steps("24 hours", "hour", timedelta(hours=1), 24, "%H:%M"),
    Period.DAYS: Steps("30 days", "day", timedelta(days=1), 30, "%d %b"),
}


@dataclass(slots=True)
class Step:
    """What was counted in one minute, hour or day. `run` and `wait` are histograms."""

    start: datetime
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RESULTS, 0))
    run: Sequence[int] = ()
    wait: Sequence[int] = ()

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class History:
    """The steps of a period, oldest first. The last one is not over yet."""

    period: Period
    steps: list[Step]


def read_history(period: Period) -> History:
    """Read a period up to now. What the tally has not folded yet, at most some seconds, is not in it."""
    how = STEPS[period]
    with engine().connect() as connection:
        last = _floor(now(connection), how.span)
        found = {start: Step(start) for start in (last - back * how.length for back in reversed(range(how.count)))}
        for each in read_summed_history(connection, how.span, min(found)):
            if (step := found.get(each.start.astimezone(UTC))) and each.result in RESULTS:
                step.counts[each.result] += each.count
                step.run, step.wait = add(step.run, each.run), add(step.wait, each.wait)
    return History(period, list(found.values()))


def _floor(at: datetime, span: Span) -> datetime:
    """Return the begin of the minute, hour or day (UTC), as the tally writes it."""
    begin = at.astimezone(UTC).replace(second=0, microsecond=0)
    if span == "minute":
        return begin
    return begin.replace(minute=0) if span == "hour" else begin.replace(minute=0, hour=0)
