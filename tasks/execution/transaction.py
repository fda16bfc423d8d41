"""The `db` of a transactional handler: a session in the transaction that will also say SUCCEEDED.

Its handler may do anything in it but end it: `commit`, `rollback` and `close` would tear the effect from the SUCCEEDED
that belongs to it, and are refused (P3). Savepoints (`begin_nested`) are the handler's own.

There are other ways to say COMMIT, and the database refuses those: the transaction opens with a cursor that a COMMIT
would have to read to its end, and that cannot be read (`settle_statements.BEGIN_BATCH`). Settling closes it. So a
transaction that settling has not seen is never committed, and where it finds no cursor, the transaction is another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from psycopg2.extensions import TRANSACTION_STATUS_IDLE, TRANSACTION_STATUS_INTRANS
from sqlalchemy import Connection, TextClause
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from models.engine import Bind
from models.errors import CeleriacError, Misuse
from tasks.execution.settle_statements import BEGIN_BATCH, CHECK_DEFERRED


class TransactionMisused(Misuse):
    """A handler does not end the transaction that it was given: its effect and SUCCEEDED commit together.

    A transactional handler committed or rolled back the session that it was given.
    """

    code = "transaction_misused"
    remedy = "Remove the commit or rollback: Celeriac commits the handler's writes together with SUCCEEDED."


class TransactionFailed(CeleriacError):
    """The handler went on after an error of the database, and what it wrote cannot be committed: use a savepoint.

    The handler caught a database error, and its transaction cannot be used any more.
    """

    code = "transaction_failed"
    remedy = "Run the statement that may fail inside `with db.begin_nested():`."


class LedgerLost(CeleriacError):
    """The connection to the ledger was lost in the middle of a transaction.

    PostgreSQL was restarted or became unreachable while a handler ran.
    """

    code = "ledger_lost"
    remedy = "Nothing: the task runs again when PostgreSQL is back."


@contextmanager
def handler_session(engine: Bind) -> Iterator[HandlerSession]:
    """A session in a new transaction, which is rolled back unless `commit_batch` was called."""
    db = HandlerSession(engine)
    try:
        db.begin_batch()
    except DBAPIError as error:
        raise LedgerLost from error
    try:
        yield db
    finally:
        db.end()


class HandlerSession(Session):
    """Only its maker can end it."""

    def __init__(self, engine: Bind) -> None:
        super().__init__(engine, expire_on_commit=False)

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

    def begin_batch(self) -> None:
        self._plain = self.connection()
        self._plain.execute(BEGIN_BATCH)
        self._driver: Any = self._plain.connection.dbapi_connection

    def execute(self, statement: Any, params: Any = None, **options: Any) -> Any:
        """`text` goes straight to the connection, where the session would send it after a long look at it."""
        if type(statement) is TextClause and not options and self.is_active and not self.in_nested_transaction():
            return self._plain.execute(statement, params)
        return super().execute(statement, params, **options)

    def take_stock(self) -> None:
        """After a handler: what the ORM still holds is its doing, and so is what became of the transaction."""
        self.flush()
        if self.is_lost:
            raise LedgerLost
        if self.was_ended:
            raise TransactionMisused
        if not self.is_active or self._driver.get_transaction_status() != TRANSACTION_STATUS_INTRANS:
            raise TransactionFailed

    @property
    def is_lost(self) -> bool:
        return bool(self._driver.closed)

    @property
    def was_ended(self) -> bool:
        """Somebody else than the ORM, which ends it when a flush fails, has said COMMIT or ROLLBACK."""
        return self.is_active and self._driver.get_transaction_status() == TRANSACTION_STATUS_IDLE

    def commit_batch(self) -> None:
        """In a test's own transaction (`tasks/testing/`) it ends a savepoint, which looks at no deferred constraint."""
        if isinstance(self.bind, Connection):
            self._plain.execute(CHECK_DEFERRED)
        super().commit()

    def end(self) -> None:
        """Roll back what was not committed, and give the connection back."""
        super().close()
