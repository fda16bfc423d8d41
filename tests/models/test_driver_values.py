"""Values are read correctly by our own parsers."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from models.engine import make_engine


@pytest.mark.parametrize(
    ("written", "read"), [('{"a": [1, null]}', {"a": [1, None]}), (' {"a": 1}', {"a": 1}), ("\n[1]\n", [1]), (" 1 ", 1)]
)
@pytest.mark.parametrize("kind", ["json", "jsonb"])
def test_whitespace_around_json_is_ignored(kind: str, written: str, read: Any, database: str) -> None:
    """A handler reads its own tables through our connections, and a column of the type `json` keeps its whitespace."""
    own = make_engine(database)
    with own.connect() as connection:
        assert connection.execute(text(f"SELECT CAST(:written AS {kind})"), {"written": written}).scalar_one() == read
    own.dispose()
