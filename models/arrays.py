"""Arrays in PostgreSQL's own writing: one constant to parse, where the driver's ARRAY[…] has an expression for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID


def array(values: Iterable[Any]) -> str:
    """As the value of a parameter that the statement casts to an array type."""
    given = list(values)
    if len(set(given)) == 1:  # in most columns
        return "{" + ",".join([_element(given[0])] * len(given)) + "}"
    return "{" + ",".join(map(_element, given)) + "}"


def array_of_ids(ids: Iterable[str | UUID]) -> str:
    """Without a look at what is in them: the cast to uuid[] takes nothing else."""
    return "{" + ",".join([id_ if isinstance(id_, str) else id_.hex for id_ in ids]) + "}"


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    written = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{written}"'
