"""Work inside the transaction of a user's test: in a savepoint, without ever committing.

The test owns the transaction and rolls it back. If a handler calls `commit`, SQLAlchemy's event refuses it. If it sends
COMMIT as text, the database refuses it (`settle_statements.BEGIN_BATCH`); the test's transaction is then lost, and the
error says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from psycopg2.extensions import TRANSACTION_STATUS_IDLE
from sqlalchemy import Connection, event
from sqlalchemy.orm import Session

from models.engine import engine
from models.errors import Misuse
from models.guarded_session import TransactionMisused
from outbox.lease import Db

ENDED: Final = "The handler ended the transaction of your test, and its content is lost. A handler must not commit."


@contextmanager
def inside(db: Db | None) -> Iterator[Connection]:
    """Open a savepoint in the transaction of `db`. Without `db`, open a transaction, which is rolled back."""
    if db is None:
        with engine().connect() as own, own.begin() as transaction:
            with _savepoint(own):
                yield own
            transaction.rollback()
        return
    if isinstance(db, Session):
        db.flush()  # the handler sees what the test has added
        with _savepoint(db.connection()) as connection:
            yield connection
        db.expire_all()  # the test sees what the handler has written
    elif isinstance(db, Connection):
        with _savepoint(db) as connection:
            yield connection
    else:
        raise Misuse("`db` must be a Session or Connection of SQLAlchemy, and not an asynchronous one.")


@contextmanager
def _savepoint(connection: Connection) -> Iterator[Connection]:
    _check(connection)
    savepoint = connection.begin_nested()
    transaction: Any = connection.get_transaction()
    driver: Any = connection.connection.dbapi_connection
    event.listen(connection, "commit", _refuse)
    try:
        with savepoint:
            yield connection
    except Exception as error:
        if transaction.is_active and driver.get_transaction_status() != TRANSACTION_STATUS_IDLE:
            raise
        driver.rollback()  # SQLAlchemy believes that the transaction is over
        raise TransactionMisused(ENDED) from error
    finally:
        event.remove(connection, "commit", _refuse)


def _refuse(_connection: Connection) -> NoReturn:
    raise TransactionMisused


def _check(connection: Connection) -> None:
    if connection.dialect.driver != "psycopg2":
        dialect = f"{connection.dialect.name}+{connection.dialect.driver}"
        raise Misuse(f"Connect with psycopg2 (postgresql+psycopg2://…); this connection uses {dialect}.")
    driver: Any = connection.connection.dbapi_connection
    if driver.autocommit:
        raise Misuse("This connection is in autocommit mode, so nothing could be rolled back. Use one that is not.")
