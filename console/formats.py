"""How pages write numbers, durations, rates and times."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from markupsafe import Markup, escape

from tasks.operations.stats import StatusCount

UNITS: Final = ("bytes", "KiB", "MiB", "GiB")
MOST_INDENTATION: Final = 1_000_000  # spaces in one text


def number(value: int) -> str:
    """Return, for example, `12,345`."""
    return f"{value:,}"


def size(value: int) -> str:
    """Return a number of bytes as people say it: `512 bytes`, `3.4 KiB`, `20 MiB`."""
    power = min(max(value.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    amount = value / 1024**power
    return f"{amount:.1f} {UNITS[power]}" if amount < 9.95 and value % 1024**power else f"{amount:,.0f} {UNITS[power]}"


def count(value: StatusCount) -> str:
    """Return a count, with ≈ if it is an estimate."""
    return f"{'' if value.exact else '≈ '}{value.count:,}"


def duration(value: timedelta | float | None) -> str:
    """Return a duration as people say it: `0.4 s`, `42 s`, `3 m`, `5 h 12 m`, `4 d`."""
    if value is None:
        return "–"
    seconds = max(0.0, value.total_seconds() if isinstance(value, timedelta) else value)
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} m"
    hours, minutes = divmod(minutes, 60)
    if hours < 10:
        return f"{hours} h {minutes} m" if minutes else f"{hours} h"
    return f"{hours} h" if hours < 48 else f"{hours // 24:,} d"


def rate(per_second: float | None) -> str:
    """Return a rate, per minute if it is slow: `3/min`, `2.4/s`, `240/s`, `1.2k/s`."""
    if per_second is None:
        return ""
    if per_second < 0.1:
        per_minute = per_second * 60
        if not per_minute:
            return "0/s"
        return f"{per_minute:.0f}/min" if per_minute >= 0.5 else "<1/min"
    if per_second < 9.95:
        return f"{per_second:.1f}/s"
    if per_second < 999.5:
        return f"{per_second:.0f}/s"
    return f"{per_second / 1000:.1f}k/s"


def clock(at: datetime) -> str:
    """Return the time of day in UTC."""
    return f"{at.astimezone(UTC):%H:%M:%S} UTC"


def moment(at: datetime) -> str:
    """Return the date and the time of day in UTC."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def distance(at: datetime, now: datetime) -> str:
    """Return how far a moment is from now: `3 m ago`, `in 42 s`, `now`."""
    if abs(at - now) < timedelta(milliseconds=500):
        return "now"
    return f"{duration(now - at)} ago" if at < now else f"in {duration(at - now)}"


def with_code(sentence: str) -> Markup:
    """Return a sentence as HTML, with what stands between backticks as code."""
    parts = sentence.split("`")
    if len(parts) % 2 == 0:  # a backtick has no partner: it is a character of the text
        return escape(sentence)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else escape(part) for place, part in enumerate(parts)
    )


def as_json(value: Any) -> str:
    """Return JSON as people read it: indented, unless that would make it many times as long, and take a second."""
    if _indentation(value) > MOST_INDENTATION:
        return json.dumps(value, ensure_ascii=False, separators=(",\n", ": "))
    return json.dumps(value, ensure_ascii=False, indent=2)


def _indentation(value: Any) -> int:
    """Return how many spaces would indent the value; not more exactly than that they are too many."""
    spaces, depth, level = 0, 0, [value]
    while level and spaces <= MOST_INDENTATION:
        spaces += 2 * depth * len(level)
        inside = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level, depth = [child for each in inside for child in each], depth + 1
    return spaces
