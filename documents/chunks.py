"""Text → chunks of about half a page, each with the end of the one before: what one of them cuts is whole in another.

Nothing is lost: what the chunks hold after their overlaps, one after the other, is the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

SIZE: Final = 1200  # characters, without the overlap
OVERLAP: Final = 200

# Where a chunk may end, the best first; each is looked for in the second half of what fits.
BORDERS: Final = (
    re.compile(r"\n[ \t]*\n"),
    re.compile(r"[.!?…][\"'”’»)\]]*\s|[。！？]"),
    re.compile(r"\n"),
    re.compile(r"\s"),
)
SPACE: Final = re.compile(r"\s")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a text; its first `overlap` characters repeat the end of the one before."""

    text: str
    overlap: int


def chunks(text: str, *, size: int = SIZE, overlap: int = OVERLAP) -> list[Chunk]:
    found: list[Chunk] = []
    start = 0
    while start < len(text):
        end = _end(text, start, size)
        again = _overlap_start(text, start, overlap)
        found.append(Chunk(text[again:end], start - again))
        start = end
    return found


def _end(text: str, start: int, size: int) -> int:
    if len(text) - start <= size:
        return len(text)
    for border in BORDERS:
        ends = [match.end() for match in border.finditer(text, start + size // 2, start + size)]
        if ends:
            return ends[-1]
    return start + size  # one long word, or a script without spaces


def _overlap_start(text: str, start: int, overlap: int) -> int:
    """The beginning of a word, if there is one."""
    earliest = max(0, start - overlap)
    if not earliest:
        return 0
    space = SPACE.search(text, earliest, start)
    return space.end() if space else earliest
