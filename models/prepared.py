"""Statements of the hot path, planned once per connection instead of once per call.

Planning a claim takes longer than claiming one task. psycopg2 knows no prepared statements, so they are prepared in
SQL, on each connection when it first needs them, and only on connections of our own making. A pooler that hands every
transaction another connection (PgBouncer in transaction mode) does not keep them: LEDGER_PREPARED_STATEMENTS=false
sends the text each time.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, CursorResult, TextClause
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.exc import DBAPIError

import settings
from models.database_errors import as_sqlalchemy_says_it
from models.engine import is_at_once, is_ours
from models.sql import sql

_KEY: Final = "celeriac_prepared"
_NOT_THERE: Final = "26000"  # no such prepared statement
_STALE: Final = {_NOT_THERE, "0A000"}  # cached plan must not change result type
_numbers = itertools.count()
_NUMBERED: Final = PGDialect(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]


class Prepared:
    """One statement of the ledger. The type of each parameter follows from its place; where it does not, use a CAST."""

    def __init__(self, statement: str, *, before: str = "") -> None:
        """`before` is sent along each time, in the same round trip: a statement without parameters, with its `;`."""
        self.text: Final = sql(before + statement)
        self._before = before
        self._statement = sql(statement)
        self._by_schema: dict[str, _Compiled] = {}

    def execute(self, connection: Connection, values: Mapping[str, Any]) -> CursorResult[*tuple[Any, ...]]:
        if not _prepares(connection):
            return connection.execute(self.text, values)
        try:
            return self._execute(connection, values)
        except DBAPIError as error:
            if not _may_be_sent_again(connection, error):
                raise
            return self._execute(connection, values)

    def row(self, connection: Connection, values: Mapping[str, Any]) -> Sequence[Any]:
        """Its one row. Where it is a transaction by itself, on a connection of ours, it goes straight to the driver.

        What SQLAlchemy does around a statement takes as long as a small statement. In a transaction of the caller it
        is done all the same: the caller's log and tracing want to see what is in it.
        """
        if not (is_at_once(connection) and _prepares(connection)):
            return self.execute(connection, values).one()
        try:
            return self._row(connection, values)
        except DBAPIError as error:
            if not _may_be_sent_again(connection, error):
                raise
            return self._row(connection, values)

    def _execute(self, connection: Connection, values: Mapping[str, Any]) -> CursorResult[*tuple[Any, ...]]:
        return connection.exec_driver_sql(self.executing(self._prepared(connection)), dict(values))

    def _row(self, connection: Connection, values: Mapping[str, Any]) -> Sequence[Any]:
        text = self.executing(self._prepared(connection))
        driver: Any = connection.connection.dbapi_connection
        try:
            with driver.cursor() as cursor:
                cursor.execute(text, values)
                row: Sequence[Any] = cursor.fetchone()
        except connection.dialect.loaded_dbapi.Error as error:
            raise as_sqlalchemy_says_it(error, connection) from error
        return row

    def rows(self, connection: Connection, values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        """All of its rows, as the driver makes them."""
        result = self.execute(connection, values)
        rows = result.cursor.fetchall()
        result.close()
        return rows

    def _prepared(self, connection: Connection) -> str:
        """Under which name this connection knows it."""
        known: dict[str, str] = connection.info.setdefault(_KEY, {})
        compiled = self._compiled()
        if compiled.name not in known:
            name = f"{compiled.name}_{next(_numbers)}"  # never tried before: a time limit may strike before it is known
            connection.exec_driver_sql(self.preparing(name))
            known[compiled.name] = name
        return known[compiled.name]

    def preparing(self, name: str) -> str:
        return f"PREPARE {name}{self._compiled().prepares}"

    def executing(self, name: str) -> str:
        return name.join(self._compiled().executes)

    def _compiled(self) -> _Compiled:
        schema = settings.current().ledger_schema
        if schema not in self._by_schema:
            self._by_schema[schema] = _Compiled.of(self._statement, self._before)
        return self._by_schema[schema]


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A statement in the current schema: its name on every connection, and the texts that prepare and execute it."""

    name: str
    prepares: str
    executes: tuple[str, str]

    @classmethod
    def of(cls, statement: TextClause, before: str) -> _Compiled:
        compiled = statement.compile(dialect=_NUMBERED)
        arguments = ", ".join(f"%({name})s" for name in compiled.positiontup or ())
        return cls(
            f"celeriac_{hashlib.sha256(statement.text.encode()).hexdigest()[:16]}",
            f" AS {compiled}".replace("%", "%%"),
            (f"{before} EXECUTE ", f"({arguments})"),
        )


def was_dropped(error: DBAPIError) -> bool:
    """The server knew no plan of that name. The next transaction makes it anew."""
    return getattr(error.orig, "pgcode", None) == _NOT_THERE


def _may_be_sent_again(connection: Connection, error: DBAPIError) -> bool:
    """A plan that the server has dropped (DEALLOCATE), or that no longer fits the schema, is made anew the next time.

    That is now, where the statement was alone in its transaction.
    """
    if getattr(error.orig, "pgcode", None) not in _STALE:
        return False
    connection.info.pop(_KEY, None)
    return is_at_once(connection)


def _prepares(connection: Connection) -> bool:
    return is_ours(connection) and settings.current().ledger_prepared_statements
