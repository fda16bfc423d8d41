"""Read and write values in PostgreSQL's own notation, in half the time that the driver's general code takes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final
from uuid import UUID, SafeUUID

from psycopg2.extensions import new_type, register_type
from sqlalchemy.pool import ConnectionPoolEntry


class UnparsableJson(str):
    """The text of JSON that PostgreSQL stores but Python cannot parse: a number of 5,000 digits, 3,000 nested lists.

    Reading a batch must not fail because of one of its rows.
    """


def parse_json(written: str) -> Any:
    """Return the value of a JSON column, or its text as `UnparsableJson`.

    `raw_decode` does not look for whitespace around the value, which saves time. A column of the type `jsonb` has none;
    a column of the type `json` may have some, and is then decoded in a second attempt.
    """
    try:
        return _DECODER.raw_decode(written)[0]
    except (ValueError, RecursionError):
        try:
            return _DECODER.decode(written)
        except (ValueError, RecursionError):
            return UnparsableJson(written)


def register_uuid_parser(connection: Any, _record: ConnectionPoolEntry) -> None:
    """Make a new connection of the driver return uuid values as `UUID`."""
    register_type(_UUID_TYPE, connection)


def _parse_uuid(written: str | bytes | None, _cursor: Any) -> UUID | None:
    """Return what `UUID(written)` would, without its checks."""
    if not isinstance(written, str):
        return None
    made = object.__new__(UUID)
    object.__setattr__(made, "int", int(written.replace("-", ""), 16))
    object.__setattr__(made, "is_safe", _UNKNOWN)
    return made


def array(values: Iterable[Any]) -> str:
    """Return values as the text of a PostgreSQL array; the statement casts the parameter to the array's type."""
    given = list(values)
    if len(set(given)) == 1:  # true for most columns of a batch
        return "{" + ",".join([_element(given[0])] * len(given)) + "}"
    return "{" + ",".join(map(_element, given)) + "}"


def array_of_ids(ids: Iterable[str | UUID]) -> str:
    """Return ids as the text of a PostgreSQL array. Nothing is escaped: the cast to uuid[] rejects everything else."""
    return "{" + ",".join([id_ if isinstance(id_, str) else id_.hex for id_ in ids]) + "}"


def storable(text: str) -> str:
    """Replace what PostgreSQL cannot store in a text: NUL characters and unpaired surrogates."""
    return _NOT_STORABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    written = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{written}"'


_NOT_STORABLE: Final = re.compile("[\x00\ud800-\udfff]")
_UNKNOWN: Final = SafeUUID.unknown
_DECODER: Final = json.JSONDecoder()
_UUID_TYPE: Final = new_type((2950,), "celeriac_uuid", _parse_uuid)  # 2950 is the oid of the type uuid
