"""Payload, context and result of a task as searchable text, cut to what fits on its page."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

from console.door import PREFIX
from console.formats import as_json
from tasks.operations.task_details import StoredTask

PARTS: Final = ("payload", "context", "result")
LONGEST_TEXT: Final = 20_000  # characters on the page of the task
LONGEST_SEARCH: Final = 200
MOST_MATCHES: Final = 20  # of each text
AROUND: Final = 80  # characters of a line before and after a match


@dataclass(frozen=True, slots=True)
class Match:
    """A place where the search was found, with the rest of its line."""

    line: int
    before: str
    found: str
    after: str


@dataclass(frozen=True, slots=True)
class Text:
    """A JSON value as text. What does not fit on the page is on a page of its own; a search finds it nevertheless."""

    title: str
    path: str
    text: str
    size: int
    is_cut: bool
    matches: list[Match] = field(default_factory=list)  # the first of them
    lines: int = 0  # that match


def texts_of(task: StoredTask, search: str = "") -> list[Text]:
    """Return the texts of a task that has them, each with the lines that contain the search."""
    return [_text(name, task, search) for name in PARTS if value_of(name, task) not in (None, {})]


def value_of(name: str, task: StoredTask) -> Any:
    return getattr(task, name)


def _text(name: str, task: StoredTask, search: str) -> Text:
    text = as_json(value_of(name, task))
    matches, lines = _find(text, search) if search else ([], 0)
    return Text(
        name.capitalize(),
        f"{PREFIX}/tasks/{task.task_id}/text/{name}",
        text[:LONGEST_TEXT],
        len(text),
        len(text) > LONGEST_TEXT,
        matches,
        lines,
    )


def _find(text: str, search: str) -> tuple[list[Match], int]:
    """Return the first match in each of the first lines that match, whether in capitals or not; and count the lines."""
    pattern, found, lines = re.compile(re.escape(search), re.IGNORECASE), [], 0
    for number, line in enumerate(text.split("\n"), start=1):
        if place := pattern.search(line):
            lines += 1
            if lines <= MOST_MATCHES:
                start, end = place.span()
                before, after = line[max(0, start - AROUND) : start], line[end : end + AROUND]
                found.append(Match(number, before, place[0], after))
    return found, lines
