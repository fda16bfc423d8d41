"""The result and the errors of reading a file. The reader process loads this module, so it imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass


class Unreadable(Exception):
    """The file can never be read. The message is shown to the user who uploaded it."""


@dataclass(frozen=True, slots=True)
class Extracted:
    """The text of a file."""

    text: str
    pages: int | None = None


class TooMuchText(Unreadable):
    """The file has more text than is allowed."""

    def __init__(self, max_characters: int) -> None:
        super().__init__(f"The file has more than {max_characters:,} characters of text (DOCUMENT_MAX_BYTES).")
