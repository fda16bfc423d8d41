"""What the readers of files share. A process of its own loads them too: they import nothing of ours but each other."""

from __future__ import annotations

from dataclasses import dataclass


class Unreadable(Exception):
    """The file will never give a text. Its message is a sentence for whoever uploaded it."""


@dataclass(frozen=True, slots=True)
class Extracted:
    """The text of a file."""

    text: str
    pages: int | None = None


class TooMuchText(Unreadable):
    """The file holds more text than is allowed."""

    def __init__(self, most: int) -> None:
        super().__init__(f"It holds more than {most:,} characters of text.")
