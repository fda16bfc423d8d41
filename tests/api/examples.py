"""Read the curl examples of docs/api.md as requests."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from settings import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()


@dataclass
class Example:
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None
    file: Path | None = None
    given_method: str | None = None

    @property
    def method(self) -> str:
        if self.given_method:
            return self.given_method
        return "GET" if self.body is None and self.file is None else "POST"

    @property
    def path(self) -> str:
        return self.url.removeprefix("$API_URL").partition("?")[0]

    def options(self, **variables: str) -> dict[str, Any]:
        """Return the arguments for a test client, whose base address stands for $API_URL."""
        options: dict[str, Any] = {
            "url": _filled(self.url.removeprefix("$API_URL"), variables),
            "headers": {name: _filled(value, variables) for name, value in self.headers.items()},
        }
        if self.file:
            options["files"] = {"file": (self.file.name, self.file.read_bytes())}
        elif self.body is not None:
            options["content"] = self.body
        return options


def examples() -> list[Example]:
    """Return the examples in the order of the page."""
    code = "".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    return [_read(shlex.split(line)[1:]) for line in code.splitlines() if line.startswith("curl ")]


def _read(words: list[str]) -> Example:
    example, rest = Example(), iter(words)
    for word in rest:
        match word:
            case "-H":
                name, _, value = next(rest).partition(": ")
                example.headers[name] = value
            case "-X":
                example.given_method = next(rest)
            case "-d":
                example.body = next(rest)
            case "-F":
                example.file = ROOT / next(rest).removeprefix("file=@")
            case _:
                assert word.startswith("$API_URL/"), word
                example.url = word
    return example


def _filled(text: str, variables: dict[str, str]) -> str:
    for name, value in variables.items():
        text = text.replace(f"${name}", value)
    assert "$" not in text, text
    return text
