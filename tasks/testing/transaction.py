"""The transaction of a user's test: everything happens in a savepoint of it, and nothing in here ever commits.

The test owns the transaction and rolls it back. A handler that tries to end it is stopped where SQLAlchemy says COMMIT,
and by the database where it does so behind its back (`settle_statements.BEGIN_BATCH`): then the test's transaction is
gone, and the test is told.
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
from outbox.lease import Db
from tasks.execution.transaction import TransactionMisused

ENDED: Final = "The handler ended the transaction of your test; what was in it is gone. A handler never commits."


@contextmanager
def inside(db: Db | None) -> Iterator[Connection]:
    """A savepoint in the transaction of `db`; of none, in one of its own, which is rolled back."""
    if db is None:
        with engine().connect() as own, own.begin() as all_of_it:
            with _savepoint(own):
                yield own
            all_of_it.rollback()
        return
    if isinstance(db, Session):
        db.flush()  # what the test has added is there for the handler
        with _savepoint(db.connection()) as connection:
            yield connection
        db.expire_all()  # and the test sees what the handler has written
    elif isinstance(db, Connection):
        with _savepoint(db) as connection:
            yield connection
    else:
        raise Misuse("db is a Session or a Connection of SQLAlchemy, and not an asynchronous one.")


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
        driver.rollback()  # SQLAlchemy no longer knows what there is to be rolled back
        raise TransactionMisused(ENDED) from error
    finally:
        event.remove(connection, "commit", _refuse)


def _refuse(_connection: Connection) -> NoReturn:
    raise TransactionMisused


def _check(connection: Connection) -> None:
    if connection.dialect.driver != "psycopg2":
        raise Misuse(f"The ledger is spoken to with psycopg2, and this connection is one of {connection.dialect.name}+"
                     f"{connection.dialect.driver}.")  # fmt: skip
    driver: Any = connection.connection.dbapi_connection
    if driver.autocommit:
        raise Misuse("This connection commits every statement, so that nothing could be rolled back: take another one.")
