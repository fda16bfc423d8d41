"""What an error of the database means for whoever asked: the ledger is away, busy, or of another age.

`models/engine.py` says so of connections that cannot be made; this is about those that broke, and about statements that
were refused. A refusal that is our own fault means nothing to a caller: None.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolIsEmpty

from models.errors import CeleriacError, LedgerBusy, SchemaMismatch, Unreachable

BY_STATE: Final[dict[str, tuple[type[CeleriacError], str | None]]] = {
    "40001": (LedgerBusy, None),  # not serializable
    "40P01": (LedgerBusy, None),  # deadlock
    "55P03": (LedgerBusy, None),  # lock timeout
    "57014": (LedgerBusy, None),  # statement timeout
    "42P01": (SchemaMismatch, None),  # no such table
    "42703": (SchemaMismatch, None),  # no such column
    "42883": (SchemaMismatch, None),  # no such function
    "25006": (Unreachable, "The ledger takes no writes: it is a standby, or closed by an operator."),
}


def as_sqlalchemy_says_it(error: Exception, connection: Connection) -> DBAPIError:
    """Of an error that the driver told us directly. A connection that broke is given up."""
    base = connection.dialect.loaded_dbapi.Error
    assert isinstance(error, base)
    is_lost = connection.dialect.is_disconnect(error, connection.connection, None)
    if is_lost:
        connection.invalidate(error)
    said = DBAPIError.instance(
        *(None, None, error, base), hide_parameters=True, connection_invalidated=is_lost, dialect=connection.dialect
    )
    assert isinstance(said, DBAPIError)
    return said


def meaning(error: Exception) -> CeleriacError | None:
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
