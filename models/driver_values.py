"""Read and write values in PostgreSQL's own notation, in half the time that the driver's general code takes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final
from uuid import UUID, SafeUUID

from psycopg2.extensions import new_type, register_type
from sqlalchemy.pool import ConnectionPoolEntry


class Unreadable(str):
    """JSON that PostgreSQL holds and Python cannot: a number of 5,000 digits, 3,000 levels. As it is written.

    Whoever reads a batch must not fail over one of its rows.
    """


def read_json(written: str) -> Any:
    """With nothing around it: `json.loads` spends more time on looking for that. Only `json` keeps what was there."""
    try:
        return _DECODER.raw_decode(written)[0]
    except (ValueError, RecursionError):
        return _read_with_care(written)


def read_ids(connection: Any, _record: ConnectionPoolEntry) -> None:
    """On this connection, from now on."""
    register_type(_ID, connection)


def _read_with_care(written: str) -> Any:
    try:
        return _DECODER.decode(written)
    except (ValueError, RecursionError):
        return Unreadable(written)


def _read_id(written: str | bytes | None, _cursor: Any) -> UUID | None:
    if not isinstance(written, str):
        return None
    made = object.__new__(UUID)
    object.__setattr__(made, "int", int(written.replace("-", ""), 16))
    object.__setattr__(made, "is_safe", _UNKNOWN)
    return made


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


_UNKNOWN: Final = SafeUUID.unknown
_DECODER: Final = json.JSONDecoder()
_ID: Final = new_type((2950,), "celeriac_id", _read_id)  # the type uuid
