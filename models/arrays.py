"""Arrays in PostgreSQL's own writing: one constant to parse, where the driver's ARRAY[…] has an expression for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID


def array(values: Iterable[Any]) -> str:
    """As the value of a parameter that the statement casts to an array type."""
    given = list(values)
    if given and isinstance(given[0], UUID):
        return "{" + ",".join(map(str, given)) + "}"
    if len(set(given)) == 1:  # in most columns
        return "{" + ",".join([_element(given[0])] * len(given)) + "}"
    return "{" + ",".join(map(_element, given)) + "}"


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    written = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{written}"'
