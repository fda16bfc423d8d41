"""The result of a check: what was checked, how it is, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is. Only FAIL makes `manage.py check` exit with 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    level: Level
    message: str
    remedy: str = ""


def ok(name: str, message: str) -> Finding:
    return Finding(name, Level.OK, message)


def warn(name: str, message: str, remedy: str) -> Finding:
    return Finding(name, Level.WARN, message, remedy)


def fail(name: str, message: str, remedy: str) -> Finding:
    return Finding(name, Level.FAIL, message, remedy)


def expect(name: str, found: object, wanted: object, remedy: str, *, else_: Level = Level.FAIL) -> Finding:
    """Compare a server's setting with the value that Celeriac needs."""
    if found == wanted:
        return ok(name, f"{found}")
    return Finding(name, else_, f"is {found}, must be {wanted}", remedy)
