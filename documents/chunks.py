"""Split text into chunks of about half a page that overlap, so that a sentence cut by one chunk is whole in another.

Nothing is lost: the chunks without their overlaps, joined together, are the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

SIZE: Final = 1200  # characters, without the overlap
OVERLAP: Final = 200

# Where a chunk may end, the best place first. Each is looked for in the second half of the text that fits.
BORDERS: Final = (
    re.compile(r"\n[ \t]*\n"),
    re.compile(r"[.!?…][\"'”’»)\]]*\s|[。！？]"),
    re.compile(r"\n"),
    re.compile(r"\s"),
)
SPACE: Final = re.compile(r"\s")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a text. Its first `overlap` characters repeat the end of the previous chunk."""

    text: str
    overlap: int


def split(text: str, *, size: int = SIZE, overlap: int = OVERLAP) -> list[Chunk]:
    """Return the chunks of a text, in order."""
    chunks: list[Chunk] = []
    start = 0
    while start < len(text):
        end = _find_end(text, start, size)
        overlap_start = _find_overlap_start(text, start, overlap)
        chunks.append(Chunk(text[overlap_start:end], start - overlap_start))
        start = end
    return chunks


def _find_end(text: str, start: int, size: int) -> int:
    if len(text) - start <= size:
        return len(text)
    for border in BORDERS:
        ends = [match.end() for match in border.finditer(text, start + size // 2, start + size)]
        if ends:
            return ends[-1]
    return start + size  # one long word, or a script without spaces


def _find_overlap_start(text: str, start: int, overlap: int) -> int:
    """Prefer the beginning of a word."""
    earliest = max(0, start - overlap)
    if not earliest:
        return 0
    space = SPACE.search(text, earliest, start)
    return space.end() if space else earliest
