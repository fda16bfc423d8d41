"""A session whose transaction its user cannot end: a handler, or the function that a sink runs.

`commit`, `rollback` and `close` would separate the effect from what must commit with it, and are refused. Savepoints
(`begin_nested`) are the user's own.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from sqlalchemy import Connection, TextClause
from sqlalchemy.orm import Session

from models.engine import Bind
from models.errors import CeleriacError, Misuse

ENDED_BY_FUNCTION: Final = "The function that was given to a sink ended its transaction, which the sink commits."


class TransactionMisused(Misuse):
    """The handler ended the transaction that it was given, in which its effects and SUCCEEDED commit together.

    A transactional handler, or a function that was given to a sink, committed, rolled back or closed its session.
    """

    code = "transaction_misused"
    remedy = "Remove the commit or rollback: Celeriac commits the handler's writes together with SUCCEEDED."


class TransactionFailed(CeleriacError):
    """The handler continued after a database error, and what it wrote cannot be committed: use a savepoint.

    A handler, or a function that was given to a sink, caught a database error. Its transaction cannot be used any more.
    """

    code = "transaction_failed"
    remedy = "Run the statement that may fail inside `with db.begin_nested():`."


class GuardedSession(Session):
    """A session that refuses to be ended by its user. Its owner calls `commit_as_owner` and `end`."""

    def __init__(self, bind: Bind, *, plain: Connection | None = None) -> None:
        """`plain`: the connection of a transaction that its owner has begun by hand; the session need not begin one."""
        super().__init__(bind, expire_on_commit=False)
        self._plain = plain or self.connection()

    def execute(self, statement: Any, params: Any = None, **options: Any) -> Any:
        """Execute a statement. A `text` goes straight to the connection, which saves the session's own preparation."""
        if type(statement) is TextClause and not options and self.is_active and not self.in_nested_transaction():
            return self._plain.execute(statement, params)
        return super().execute(statement, params, **options)

    def cursor(self) -> Any:
        """Return a cursor of psycopg2 in this transaction: for small statements, SQLAlchemy's work takes longest.

        Pending objects of the ORM are flushed first. The cursor is closed with the transaction.
        """
        self.flush()
        return self._plain.connection.cursor()

    def commit(self) -> NoReturn:
        raise TransactionMisused

    def rollback(self) -> NoReturn:
        raise TransactionMisused

    def close(self) -> NoReturn:
        raise TransactionMisused

    def invalidate(self) -> NoReturn:
        raise TransactionMisused

    def reset(self) -> NoReturn:
        raise TransactionMisused

    def __enter__(self) -> NoReturn:
        raise TransactionMisused

    def commit_as_owner(self) -> None:
        super().commit()

    def end(self) -> None:
        """Roll back what was not committed, and return the connection to the pool."""
        if self._is_lost():
            super().invalidate()
        else:
            super().close()

    def _is_lost(self) -> bool:
        """Return True if the driver has lost the connection without SQLAlchemy: a cursor of its own has failed."""
        if self._plain.closed or self._plain.invalidated:
            return False
        driver: Any = self._plain.connection.dbapi_connection
        return bool(driver.closed)
