"""Points in time as an operator types them: `2026-11-16T10:30+01:00`, or how long ago: `90s`, `2h`, `3d`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

import typer

_AGO: Final = re.compile(r"(\d{1,6})([smhd])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
HELP: Final = "a time (2026-11-16T10:30, UTC unless it says otherwise) or how long ago (90s, 2h, 3d)"


def moment(given: str | None) -> datetime | timedelta | None:
    """A parser for options. A time is also understood as our tables and sentences print it."""
    if given is None:
        return None
    if ago := _AGO.fullmatch(given):
        return timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    try:
        at = datetime.fromisoformat(re.sub(" UTC$", "+00:00", given))
    except ValueError:
        raise typer.BadParameter(f"{given!r} is not {HELP}.") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)
