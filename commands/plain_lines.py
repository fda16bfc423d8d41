"""Lists whose lines stay whole: an id that is folded cannot be copied, and one line per task can be searched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def print_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned; what is stored in a task steers neither the terminal nor our markup."""
    cells = [list(columns), *([plain(cell) for cell in row] for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def plain(stored: str) -> str:
    """A text that is stored steers neither the terminal nor the lines."""
    return _CONTROL.sub(" ", stored)
