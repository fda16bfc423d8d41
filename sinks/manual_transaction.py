"""A transaction in a sink's PostgreSQL whose BEGIN and end are sent by hand.

The connection is in the driver's autocommit mode. So BEGIN can share a round trip with the first statement, and the
driver does not believe in a transaction that PREPARE has taken away from the connection.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from psycopg2 import extensions
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from models.database_errors import wrap_driver_error
from models.engine import make_engine, pool_options
from models.guarded_session import ENDED_BY_FUNCTION, GuardedSession, TransactionFailed, TransactionMisused


def sink_engine(name: str, url: str, **options: Any) -> Engine:
    """Return an engine for a sink, for transactions of this kind."""
    address = re.sub(r"^postgres(ql)?(\+psycopg2)?:", "postgresql+psycopg2:", url)
    return make_engine(
        address, application_name=f"celeriac-sink-{name}", isolation_level="AUTOCOMMIT", **pool_options(), **options
    )


class ManualTransaction:
    """An open transaction. Its owner ends it with `commit`, `roll_back` or `leave`."""

    def __init__(self, engine: Engine, begin: str = "BEGIN", values: Any = None) -> None:
        """`begin` may have a statement behind BEGIN; `answer` is the first value of its result."""
        self.connection: Connection = engine.connect()
        self.is_open = True
        try:
            self.answer = self._send(begin, values)
        except BaseException:
            self.roll_back()
            raise

    @cached_property
    def db(self) -> GuardedSession:
        """The session for the function that writes."""
        return GuardedSession(self.connection, plain=self.connection)

    @property
    def driver(self) -> Any:
        return self.connection.connection.dbapi_connection

    def flush(self) -> None:
        """Flush the ORM's objects, and raise if the function has ended the transaction or left it unusable."""
        self.db.flush()
        match self.driver.get_transaction_status():
            case extensions.TRANSACTION_STATUS_IDLE:
                raise TransactionMisused(ENDED_BY_FUNCTION)
            case extensions.TRANSACTION_STATUS_INERROR:
                raise TransactionFailed

    def commit(self) -> None:
        self._send("COMMIT")
        self.leave()

    def roll_back(self) -> bool:
        """Roll back; return False if the connection is lost, so that it is unknown what the server has done last."""
        if not self.is_open:
            return True
        try:
            if self.connection.invalidated:
                return False
            self._send("ROLLBACK")
        except DBAPIError:
            self.connection.invalidate()
            return False
        finally:
            self.leave()
        return True

    def _send(self, statement: str, values: Any = None) -> Any:
        """Execute a statement without SQLAlchemy's work around it; return the first value of its result, if any."""
        try:
            with self.driver.cursor() as cursor:
                cursor.execute(statement, values)
                row = cursor.fetchone() if cursor.description else None
        except self.connection.dialect.loaded_dbapi.Error as error:
            raise wrap_driver_error(error, self.connection) from error
        return row and row[0]

    def leave(self) -> None:
        """Return the connection to the pool. No transaction may be open in it."""
        self.is_open = False
        if "db" in self.__dict__:
            self.db.end()
        self.connection.close()
