"""Print lists one line per row, never folded, so that ids can be copied and lines can be searched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def print_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns."""
    cells = [list(columns), *([plain(cell) for cell in row] for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def plain(stored: str) -> str:
    """Replace control characters: text stored in a task must not control the terminal or break a line."""
    return _CONTROL.sub(" ", stored)
