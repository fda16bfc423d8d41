"""How commands print: tables for people on stdout, JSON for programs, sentences about failures on stderr."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

# what is piped somewhere is not folded at the width of a terminal that is not there
console: Final = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 1000)
on_stderr: Final = Console(stderr=True)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # a stored text must not steer the terminal


def complain(sentence: str) -> None:
    print(f"manage.py: {sentence}", file=sys.stderr)


def print_json(value: Any) -> None:
    written = json.dumps(value, default=_plain, ensure_ascii=False, indent=2)
    print(re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", written))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, on: Console = console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")  # a value that is cut off is of no use
    for row in rows:
        table.add_row(*(Text(_CONTROL.sub(" ", cell)) for cell in row))
    on.print(table)


def camel(value: Any) -> dict[str, Any]:
    """A dataclass as the JSON of this project spells it: camelCase, times as text, durations in seconds."""
    return {_camel(field.name): getattr(value, field.name) for field in dataclasses.fields(value)}


def moment(at: datetime | None) -> str:
    """In UTC, whatever the time zone of the session, because options read it so. The heading of its column says it."""
    return "" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def moment_utc(at: datetime | None) -> str:
    """For where no heading says it."""
    return f"{moment(at)} UTC" if at else ""


def age(of: timedelta | None) -> str:
    """`3d 4h`, `2m 5s`, `0.4s`: the two largest units."""
    if of is None:
        return ""
    seconds = of.total_seconds()
    if seconds < 60:
        return f"{seconds:.1f}s"
    days, rest = divmod(int(seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    units = [(days, "d"), (hours, "h"), (minutes, "m"), (rest, "s")]
    first = next(place for place, (number, _) in enumerate(units) if number)
    return " ".join(f"{number}{unit}" for number, unit in units[first : first + 2])


def with_progress(batches: Iterator[int], *, total: int, what: str) -> int:
    """Shows how far it is, on a terminal; returns the last number. Safe to interrupt: each batch is done or not."""
    done = 0
    with Progress(console=on_stderr, transient=True, disable=not on_stderr.is_terminal) as progress:
        bar = progress.add_task(what, total=total)
        for done in batches:
            progress.update(bar, completed=done)
    return done


def _plain(value: Any) -> Any:
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
