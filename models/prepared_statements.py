"""Statements of the hot path, planned once per connection instead of once per call.

Planning a claim takes longer than claiming one task. psycopg2 has no prepared statements, so we send PREPARE ourselves,
on each connection when it first needs the statement, and only on connections of our own engines. A pooler that gives
each transaction another connection (PgBouncer in transaction mode) loses prepared statements: with
LEDGER_PREPARED_STATEMENTS=false the text is sent each time.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

from sqlalchemy import Connection, CursorResult, text
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.exc import DBAPIError

import settings
from models.database_errors import wrap_driver_error
from models.engine import is_autocommit, is_ours
from models.sql import sql

Values = Mapping[str, Any]
Answer = TypeVar("Answer")
_KEY: Final = "celeriac_prepared"
_NOT_PREPARED: Final = "26000"  # invalid_sql_statement_name
_STALE: Final = {_NOT_PREPARED, "0A000"}  # feature_not_supported: "cached plan must not change result type"
_numbers = itertools.count()
_NUMBERED: Final = PGDialect(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]


class Prepared:
    """A statement of the ledger. PostgreSQL infers the type of each parameter; use a CAST where it cannot."""

    def __init__(self, statement: str, *, before: str = "") -> None:
        """`before` is sent in front of the statement each time: SQL without parameters that ends with a semicolon."""
        self.text: Final = sql(before + statement)
        self._before = before
        self._statement = sql(statement)

    def execute(self, connection: Connection, values: Values) -> CursorResult[*tuple[Any, ...]]:
        """Execute it through SQLAlchemy."""
        if not _prepares(connection):
            return connection.execute(self.text, values)
        return _repeat_if_stale(self._execute, connection, values)

    def row(self, connection: Connection, values: Values) -> Sequence[Any]:
        """Return its only row; on a connection of `autocommit`, ask the driver directly.

        SQLAlchemy's work around a statement takes as long as a small statement. In a transaction of the caller it is
        used all the same, because the caller's logging and tracing expect to see every statement.
        """
        if not (is_autocommit(connection) and _prepares(connection)):
            return self.execute(connection, values).one()
        return _repeat_if_stale(self._row, connection, values)

    def rows(self, connection: Connection, values: Values) -> Sequence[Sequence[Any]]:
        """Return all of its rows as the driver's tuples."""
        result = self.execute(connection, values)
        rows = result.cursor.fetchall()
        result.close()
        return rows

    def prepare_text(self, name: str) -> str:
        return f"PREPARE {name}{self._compiled().prepare}"

    def execute_text(self, name: str) -> str:
        return name.join(self._compiled().execute)

    def _execute(self, connection: Connection, values: Values) -> CursorResult[*tuple[Any, ...]]:
        return connection.exec_driver_sql(self.execute_text(self._prepare(connection)), dict(values))

    def _row(self, connection: Connection, values: Values) -> Sequence[Any]:
        text = self.execute_text(self._prepare(connection))
        driver: Any = connection.connection.dbapi_connection
        try:
            with driver.cursor() as cursor:
                cursor.execute(text, values)
                row: Sequence[Any] = cursor.fetchone()
        except connection.dialect.loaded_dbapi.Error as error:
            raise wrap_driver_error(error, connection) from error
        return row

    def _prepare(self, connection: Connection) -> str:
        """Prepare it unless this connection has done so, and return its name there."""
        known: dict[str, str] = connection.info.setdefault(_KEY, {})
        compiled = self._compiled()
        if compiled.name not in known:
            # A new name each time: if a time limit strikes before the name is noted, the server already knows it.
            name = f"{compiled.name}_{next(_numbers)}"
            connection.exec_driver_sql(self.prepare_text(name))
            known[compiled.name] = name
        return known[compiled.name]

    def _compiled(self) -> _Compiled:
        return _compile(self._statement.text, self._before)


class _Compiled(NamedTuple):
    """A statement in the current schema: what its names begin with, and the texts that prepare and execute it."""

    name: str
    prepare: str
    execute: tuple[str, str]


@cache
def _compile(statement: str, before: str) -> _Compiled:
    compiled = text(statement).compile(dialect=_NUMBERED)
    arguments = ", ".join(f"%({name})s" for name in compiled.positiontup or ())
    return _Compiled(
        f"celeriac_{hashlib.sha256(statement.encode()).hexdigest()[:16]}",
        f" AS {compiled}".replace("%", "%%"),
        (f"{before} EXECUTE ", f"({arguments})"),
    )


def _repeat_if_stale(run: Callable[[Connection, Values], Answer], connection: Connection, values: Values) -> Answer:
    """Forget a plan that was dropped (DEALLOCATE) or no longer fits the schema.

    The statement is repeated at once if it was alone in its transaction; otherwise the transaction is aborted.
    """
    try:
        return run(connection, values)
    except DBAPIError as error:
        if getattr(error.orig, "pgcode", None) not in _STALE:
            raise
        connection.info.pop(_KEY, None)
        if not is_autocommit(connection):
            raise
        return run(connection, values)


def _prepares(connection: Connection) -> bool:
    return is_ours(connection) and settings.current().ledger_prepared_statements
