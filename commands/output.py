"""How commands print: tables for people on stdout, JSON for programs, sentences about failures on stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

console: Final = Console(highlight=False, soft_wrap=True)


def complain(sentence: str) -> None:
    print(f"manage.py: {sentence}", file=sys.stderr)


def print_json(value: Any) -> None:
    print(json.dumps(value, default=_plain, ensure_ascii=False, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")  # a value that is cut off is of no use
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
