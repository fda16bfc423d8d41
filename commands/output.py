"""Print tables for people and JSON for programs on stdout, and progress on stderr."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from commands.plain_lines import plain

# Output to a pipe or a file has no terminal width: do not fold it.
console: Final = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 1000)
on_stderr: Final = Console(stderr=True)


def print_json(value: Any) -> None:
    written = json.dumps(value, default=_to_json, ensure_ascii=False, indent=2)
    print(re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", written))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, on: Console = console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")  # the default cuts long values off
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    on.print(table)


def camel(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass with the camelCase names of our JSON."""
    return {_camel(field.name): getattr(value, field.name) for field in dataclasses.fields(value)}


def format_time(at: datetime | None) -> str:
    """Return the time in UTC, for a column whose heading says so."""
    return "" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def format_time_utc(at: datetime | None) -> str:
    return f"{format_time(at)} UTC" if at else ""


def format_duration(duration: timedelta | None) -> str:
    """Return the two largest units: `3d 4h`, `2m 5s`; below a minute `0.4s`."""
    if duration is None:
        return ""
    if duration < timedelta(minutes=1):
        return f"{duration.total_seconds():.1f}s"
    minutes, seconds = divmod(int(duration.total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes}m" if hours else f"{minutes}m {seconds}s"


def plural(number: int, noun: str) -> str:
    """Return, for example, `1 task` or `2,000 tasks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def with_progress(batches: Iterator[int], *, total: int, what: str) -> int:
    """Consume the numbers done so far, show them as a progress bar on a terminal, and return the last one."""
    from rich.progress import Progress  # noqa: PLC0415 - loads slowly

    done = 0
    with Progress(console=on_stderr, transient=True, disable=not on_stderr.is_terminal) as progress:
        bar = progress.add_task(what, total=total)
        for done in batches:
            progress.update(bar, completed=done)
    return done


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.title, others))
