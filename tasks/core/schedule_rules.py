"""When a schedule is due: cron expressions in a time zone, and fixed intervals.

A rule is stored as text, `0 3 * * *` or `every 300s`, so that any process can compute the next occurrence without the
handler. Occurrences are computed from a given time, which is always the ledger's. They are in UTC and have no fraction
of a second.

Cron follows Debian's cron when the clocks change: a rule for a certain time of day (neither its minute nor its hour
begins with `*`) runs once a day, right after the gap if its time does not exist, and at the first of two equal times.
Other rules follow the wall clock, and run in both of two equal hours. Intervals count from 1970-01-01 00:00 UTC, so
that every process agrees on them, also after a restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from itertools import takewhile
from typing import Any, Final, Protocol
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from models.errors import Misuse, shorten
from models.schedules import CatchUp
from outbox.canonical_json import canonical_json

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
SHORTEST: Final = timedelta(seconds=1)
LONGEST: Final = timedelta(days=3660)
SEARCH_FROM: Final = datetime(2000, 1, 1, tzinfo=UTC)  # a rule without an occurrence in the next 50 years is refused
COUNTED: Final = timedelta(hours=1)
_EVERY: Final = "every "


class BadRule(Misuse):
    """The rule of a schedule is invalid.

    The cron expression, the interval or the time zone is not allowed, or this machine does not know the time zone.
    """

    code = "bad_rule"
    remedy = "Correct `schedule=`, `every=` or `timezone=` of the handler. If a zone is missing, install tzdata."


class Rule(Protocol):
    """A rule that can be evaluated."""

    def after(self, at: datetime) -> Iterator[datetime]:
        """Yield the occurrences after a time, in their order."""

    def latest(self, first: datetime, until: datetime) -> datetime:
        """Return the latest occurrence until a time. `first` is an earlier one, so there always is one."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a handler declares about its occurrences."""

    rule: str
    timezone: str
    catch_up: CatchUp
    payload: Mapping[str, Any]


def declared(
    schedule: str | None,
    every: timedelta | None,
    timezone: str | None,
    catch_up: str,
    payload: Mapping[str, Any] | None,
) -> Schedule | None:
    """Return the schedule that the options of a handler declare, None if they declare none, or raise BadRule."""
    if schedule is None and every is None:
        if timezone is not None or payload is not None or catch_up != CatchUp.ONCE:
            raise BadRule("timezone, catch_up and payload need a schedule or every")
        return None
    if schedule is not None and every is not None:
        raise BadRule("it has both schedule and every; use one of them")
    if catch_up not in tuple(CatchUp):
        raise BadRule(f"catch_up is {shorten(catch_up)}; it must be once, all or none")
    if payload is not None and not isinstance(payload, Mapping):
        raise BadRule("payload must be an object with names and values")
    canonical_json(payload)
    if every is not None:
        if timezone is not None:
            raise BadRule("timezone needs schedule; an interval is the same everywhere")
        text = _EVERY + f"{_whole_seconds(every)}s"
    else:
        if not isinstance(schedule, str) or len(schedule.split()) != 5:
            raise BadRule(f"schedule is {shorten(schedule)}; it must be text with five fields, as in 0 3 * * *")
        text = " ".join(schedule.split())
    zone = "UTC" if timezone is None else timezone
    next(rule_of(text, zone).after(SEARCH_FROM))
    return Schedule(text, zone, CatchUp(catch_up), dict(payload or {}))


@lru_cache(1024)
def rule_of(text: str, timezone: str) -> Rule:
    """Return the rule that was stored as this text, or raise BadRule."""
    if text.startswith(_EVERY):
        return Interval(timedelta(seconds=int(text.removeprefix(_EVERY).removesuffix("s"))))
    zone = _zone(timezone)
    try:
        CronSim(text, SEARCH_FROM)
    except (CronSimError, ValueError) as error:  # ValueError: a number with thousands of digits
        raise BadRule(f"schedule is {shorten(text)}, which is no cron expression: {shorten(str(error))}") from None
    return Cron(text, zone)


@dataclass(frozen=True, slots=True)
class Interval:
    """A fixed interval; its occurrences are its multiples since 1970."""

    every: timedelta

    def after(self, at: datetime) -> Iterator[datetime]:
        found = self._floor(at)
        while True:
            found += self.every
            yield found

    def latest(self, first: datetime, until: datetime) -> datetime:
        return max(first, self._floor(until))

    def _floor(self, at: datetime) -> datetime:
        return EPOCH + (at - EPOCH) // self.every * self.every


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression with five fields in a time zone."""

    expression: str
    zone: tzinfo

    def after(self, at: datetime) -> Iterator[datetime]:
        """Yield occurrences. cronsim begins before `at` if that is in the second of two equal hours; skip those."""
        found = CronSim(self.expression, at.astimezone(self.zone))
        while True:
            try:
                occurrence = next(found).astimezone(UTC)
            except StopIteration:
                raise BadRule(f"schedule is {shorten(self.expression)}; it never occurs") from None
            if occurrence > at:
                at = occurrence
                yield occurrence

    def latest(self, first: datetime, until: datetime) -> datetime:
        """Halve the time in question instead of counting: years of minutes may have been missed."""
        low, high = first, until  # `low` is an occurrence, and the latest one is not after `high`
        while high - low > COUNTED:
            middle = low + (high - low) / 2
            found = next(self.after(middle))
            low, high = (found, high) if found <= until else (low, middle)
        *_, found = low, *takewhile(lambda each: each <= until, self.after(low))
        return found


def _whole_seconds(every: timedelta) -> int:
    is_allowed = isinstance(every, timedelta) and SHORTEST <= every <= LONGEST and not every.microseconds
    if not is_allowed:
        raise BadRule("every must be a timedelta of whole seconds, from a second to ten years")
    return int(every.total_seconds())


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC  # faster than the ZoneInfo of the same name
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, TypeError, OSError):
        raise BadRule(f"the time zone {shorten(name)} is unknown here; write it as in Europe/Berlin") from None
