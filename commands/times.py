"""Parse the times and durations that an operator types: `2026-11-16T10:30+01:00`, `90s`, `2h`, `3d`."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

import typer

HELP: Final = "a time such as 2026-11-16T10:30 (UTC), or an age: 90s, 2h, 3d"
_DURATION: Final = re.compile(r"(\d{1,6})([smhd])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def bounds(since: str | None, until: str | None) -> tuple[datetime | None, datetime | None]:
    """Parse `--since` and `--until`. An age counts back from the ledger's clock."""
    from models.clock import as_datetime
    from models.engine import engine

    given = [parse_time(text, option) for text, option in ((since, "--since"), (until, "--until"))]
    with engine().connect() as connection:
        start, end = (as_datetime(moment, connection) for moment in given)
    return start, end


def parse_time(given: str | None, option: str, help: str = HELP) -> datetime | timedelta | None:
    """Parse a time or a duration. A time may also look as the commands print it: `2026-11-16 10:30:00 UTC`."""
    if given is None:
        return None
    if _DURATION.fullmatch(given):
        return parse_duration(given)
    try:
        at = datetime.fromisoformat(re.sub(" UTC$", "+00:00", given))
    except ValueError:
        raise typer.BadParameter(f"{given!r} is not {help}.", param_hint=option) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def parse_duration(given: str) -> timedelta:
    found = _DURATION.fullmatch(given)
    if found is None:
        raise typer.BadParameter(f"{given!r} is not a duration such as 90s, 2h or 30d.")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})
