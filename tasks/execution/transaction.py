"""The `db` of a transactional handler: a session in the transaction that also writes SUCCEEDED.

A handler may do anything in it except end it (`models/guarded_session.py`). A handler could also send COMMIT as text.
The database refuses that: the transaction begins with a cursor WITH HOLD whose query fails when it is read, and a
COMMIT has to read such a cursor to its end (`settle_statements.BEGIN_BATCH`). Settling closes the cursor. So a
transaction that was not settled is never committed. If settling finds no cursor, the handler has rolled back its
transaction and begun another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

from psycopg2.extensions import TRANSACTION_STATUS_IDLE, TRANSACTION_STATUS_INTRANS
from sqlalchemy import Connection

from models.engine import Bind
from models.errors import CeleriacError
from models.guarded_session import GuardedSession, TransactionFailed, TransactionMisused
from models.ledger_outage import wait_for_ledger
from tasks.execution.settle_statements import BEGIN_BATCH, CHECK_DEFERRED


class LedgerLost(CeleriacError):
    """The connection to the ledger was lost in the middle of a transaction.

    PostgreSQL was restarted or became unreachable while a handler ran.
    """

    code = "ledger_lost"
    remedy = "Nothing: the task runs again when PostgreSQL is back."


class TransactionState(Enum):
    """The state in which a handler has left its transaction."""

    OPEN = auto()
    FAILED = auto()  # a statement failed, or a flush of the ORM
    ENDED = auto()  # the handler sent COMMIT or ROLLBACK
    LOST = auto()  # the connection is gone


@contextmanager
def handler_session(bind: Bind) -> Iterator[HandlerSession]:
    """Open a session in a new transaction, which is rolled back unless `commit_batch` is called."""
    db = wait_for_ledger(lambda: HandlerSession(bind))
    try:
        yield db
    finally:
        db.end()


class HandlerSession(GuardedSession):
    """A session that its handler cannot end, not even with a COMMIT as text."""

    def __init__(self, bind: Bind) -> None:
        super().__init__(bind)
        try:
            self._plain.execute(BEGIN_BATCH)
        except BaseException:
            self.end()
            raise
        self._driver: Any = self._plain.connection.dbapi_connection

    @property
    def state(self) -> TransactionState:
        if self._driver.closed:
            return TransactionState.LOST
        status = self._driver.get_transaction_status()
        # After a failed flush the ORM itself has ended the transaction; the session is not active then.
        if self.is_active and status == TRANSACTION_STATUS_IDLE:
            return TransactionState.ENDED
        if not self.is_active or status != TRANSACTION_STATUS_INTRANS:
            return TransactionState.FAILED
        return TransactionState.OPEN

    def flush_and_check(self) -> None:
        """Flush the ORM's objects after a handler has returned, and raise if the transaction cannot be committed."""
        self.flush()
        match self.state:
            case TransactionState.LOST:
                raise LedgerLost
            case TransactionState.ENDED:
                raise TransactionMisused
            case TransactionState.FAILED:
                raise TransactionFailed

    def commit_batch(self) -> None:
        """Commit. In a user's test this only releases a savepoint, so deferred constraints are checked here."""
        if isinstance(self.bind, Connection):
            self._plain.execute(CHECK_DEFERRED)
        self.commit_as_owner()
