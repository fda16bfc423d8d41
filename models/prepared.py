"""Statements of the hot path, planned once per connection instead of once per call.

Planning a claim takes longer than claiming one task. psycopg2 knows no prepared statements, so they are prepared in
SQL, on each connection when it first needs them, and only on connections of our own making. A pooler that hands every
transaction another connection (PgBouncer in transaction mode) does not keep them: LEDGER_PREPARED_STATEMENTS=false
sends the text each time.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, CursorResult, TextClause, text
from sqlalchemy.dialects.postgresql.base import PGDialect

import settings
from models.engine import PREPARES

_KEY: Final = "celeriac_prepared"
_numbers = itertools.count()
_NUMBERED: Final = PGDialect(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]


class Prepared:
    """One statement. The type of each parameter shows from where it stands; where it does not, it stands in a CAST."""

    def __init__(self, statement: str, *, before: str = "") -> None:
        """`before` is sent along each time, in the same round trip: a statement without parameters, with its `;`."""
        self.text: Final[TextClause] = text(before + statement)
        compiled = text(statement).compile(dialect=_NUMBERED)
        self.name: Final = f"celeriac_{hashlib.sha256(statement.encode()).hexdigest()[:16]}"
        arguments = ", ".join(f"%({name})s" for name in compiled.positiontup or ())
        self._prepares: Final = f" AS {compiled}".replace("%", "%%")
        self._executes: Final = (f"{before} EXECUTE ", f"({arguments})")

    def execute(self, connection: Connection, values: Mapping[str, Any]) -> CursorResult[*tuple[Any, ...]]:
        if not (connection.get_execution_options().get(PREPARES) and settings.current().ledger_prepared_statements):
            return connection.execute(self.text, values)
        known: dict[str, str] = connection.info.setdefault(_KEY, {})
        if self.name not in known:
            name = f"{self.name}_{next(_numbers)}"  # never tried before: a time limit may strike before it is known
            connection.exec_driver_sql(self.preparing(name))
            known[self.name] = name
        return connection.exec_driver_sql(self.executing(known[self.name]), dict(values))

    def preparing(self, name: str) -> str:
        return f"PREPARE {name}{self._prepares}"

    def executing(self, name: str) -> str:
        return name.join(self._executes)
