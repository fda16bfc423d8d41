"""Translate database errors into errors that a caller can act on: the ledger is unreachable, busy, or not migrated.

`models/engine.py` does the same for connections that cannot be opened. This module is about connections that broke and
about statements that the database rejected.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolIsEmpty

from models.errors import CeleriacError, LedgerBusy, SchemaMismatch, Unreachable

BY_STATE: Final[dict[str, tuple[type[CeleriacError], str | None]]] = {
    "40001": (LedgerBusy, None),  # serialization_failure
    "40P01": (LedgerBusy, None),  # deadlock_detected
    "55P03": (LedgerBusy, None),  # lock_not_available
    "57014": (LedgerBusy, None),  # query_canceled, by a statement timeout
    "3F000": (SchemaMismatch, None),  # invalid_schema_name
    "42P01": (SchemaMismatch, None),  # undefined_table
    "42703": (SchemaMismatch, None),  # undefined_column
    "42883": (SchemaMismatch, None),  # undefined_function
    "25006": (Unreachable, "The ledger is read-only: it is a standby, or an operator has closed it for writes."),
}


def wrap_driver_error(error: Exception, connection: Connection) -> DBAPIError:
    """Return a psycopg2 error as SQLAlchemy would have raised it, and invalidate a connection that broke."""
    base = connection.dialect.loaded_dbapi.Error
    assert isinstance(error, base)
    is_disconnect = connection.dialect.is_disconnect(error, connection.connection, None)
    if is_disconnect:
        connection.invalidate(error)
    wrapped = DBAPIError.instance(
        *(None, None, error, base),
        hide_parameters=True,
        connection_invalidated=is_disconnect,
        dialect=connection.dialect,
    )
    assert isinstance(wrapped, DBAPIError)
    return wrapped


def translate(error: Exception) -> CeleriacError | None:
    """Return what the error means to a caller, or None if it is not a database error or is a bug in Celeriac."""
    if isinstance(error, PoolIsEmpty):
        return LedgerBusy("All connections to the ledger are in use; try again.")
    if not isinstance(error, DBAPIError):
        return None
    if known := BY_STATE.get(getattr(error.orig, "pgcode", None) or ""):
        kind, message = known
        return kind(message)
    if error.connection_invalidated or isinstance(error, OperationalError | InterfaceError):
        return Unreachable("The connection to the ledger broke.")
    return None
