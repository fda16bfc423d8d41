"""A two-phase sink in PostgreSQL: PREPARE TRANSACTION, the ledger's decision, COMMIT PREPARED.

The server must allow it: `max_prepared_transactions` above 0 (PostgreSQL's default is 0). A prepared transaction keeps
its locks, and holds back vacuum, until it is finished; a restart does not end it. So recovery never waits long, and
`manage.py sinks` shows the age of the oldest one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from sqlalchemy import Engine, text

from failpoint import failpoint
from models.errors import Unreachable
from models.guarded_session import TransactionFailed
from sinks.contract import SinkNotReady
from sinks.manual_transaction import ManualTransaction, sink_engine
from sinks.two_phase import Finished, TwoPhaseCommitSink, sink_of

logger = logging.getLogger(__name__)

PREPARED: Final = "PREPARE TRANSACTION"  # the tag of the answer; a failed transaction answers ROLLBACK instead
GONE: Final = "42704"  # undefined_object
NOT_NOW: Final = "55000"  # object_not_in_prerequisite_state: busy in another session, or not allowed by the server
TEMPORARY: Final = ("53", "57", "58")  # classes: no resources, operator intervention, system error
LIST: Final = text("""
    SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, :prefix)
""")
READY: Final = text("""
    SELECT CAST(current_setting('max_prepared_transactions') AS integer), (SELECT count(*) FROM pg_prepared_xacts)
""")
STATEMENT_TIMEOUT_SECONDS: Final = 60.0
Function = Callable[[Any], Any]


class PreparedTransaction(ManualTransaction):
    """A transaction of this process. After PREPARE it is in the server only, and no longer open here."""

    def __init__(self, gid: str, engine: Engine) -> None:
        super().__init__(engine)
        self.gid = gid

    @property
    def handle(self) -> dict[str, Any]:
        return {"gid": self.gid}


class PreparedPostgres(TwoPhaseCommitSink[Function, PreparedTransaction]):
    """A PostgreSQL that commits together with the ledger."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.engine = sink_engine(name, url, statement_timeout_seconds=STATEMENT_TIMEOUT_SECONDS)

    @property
    def conditions(self) -> Sequence[str]:
        return [
            "The server allows prepared transactions (max_prepared_transactions).",
            "The function writes through its `db` only: what it does elsewhere may be repeated.",
            "Recovery connects as the same role, and no other program ends our prepared transactions.",
        ]

    def begin_transaction(self, checkpoint_id: str) -> PreparedTransaction:
        return PreparedTransaction(checkpoint_id, self.engine)

    def invoke(self, value: Function, txn: PreparedTransaction) -> Any:
        result = value(txn.db)
        txn.flush()
        return result

    def pre_commit(self, txn: PreparedTransaction) -> None:
        with txn.driver.cursor() as cursor:
            try:
                cursor.execute("PREPARE TRANSACTION %s", (txn.gid,))
            except Exception as error:
                if getattr(error, "pgcode", None) == NOT_NOW:
                    raise self._not_allowed() from None
                raise
            failpoint("two_phase.prepared")
            if cursor.statusmessage != PREPARED:
                raise TransactionFailed
        txn.leave()

    def commit(self, txn: PreparedTransaction) -> Finished:
        return self.recover_and_commit(txn.handle)

    def abort(self, txn: PreparedTransaction) -> Finished:
        if txn.is_open and txn.roll_back():
            return Finished.DONE
        return self.recover_and_abort(txn.handle)  # prepared, perhaps although the answer to PREPARE was lost

    def recover_and_commit(self, handle: dict[str, Any]) -> Finished:
        return self._finish("COMMIT PREPARED", handle["gid"])

    def recover_and_abort(self, handle: dict[str, Any]) -> Finished:
        return self._finish("ROLLBACK PREPARED", handle["gid"])

    def list_prepared(self, prefix: str) -> Iterable[str]:
        with self.engine.connect() as connection:
            gids = connection.execute(LIST, {"prefix": prefix}).scalars().all()
        return [gid for gid in gids if sink_of(gid) == self.name]

    def handle_of(self, gid: str) -> dict[str, Any]:
        return {"gid": gid}

    def check(self) -> str:
        with self.engine.connect() as connection:
            allowed, used = connection.execute(READY).one()
        if not allowed:
            raise self._not_allowed()
        return f"{used} of {allowed} prepared transactions in use"

    def close(self) -> None:
        self.engine.dispose()

    def _not_allowed(self) -> SinkNotReady:
        remedy = "set max_prepared_transactions in its configuration, for example to 100, and restart it"
        return SinkNotReady(f"The server of the sink {self.name} prepares no transactions: {remedy}.")

    def _finish(self, order: str, gid: str) -> Finished:
        try:
            with self.engine.connect() as connection:
                driver: Any = connection.connection.dbapi_connection
                with driver.cursor() as cursor:
                    cursor.execute(f"{order} %s", (gid,))
        except Unreachable:
            return Finished.RETRY_LATER
        except Exception as error:
            match getattr(error, "pgcode", None):
                case code if code == GONE:
                    return Finished.ALREADY_DONE
                case None:  # the connection was lost; whether the order was executed is found out later
                    return Finished.RETRY_LATER
                case code if code == NOT_NOW or str(code)[:2] in TEMPORARY:
                    return Finished.RETRY_LATER
            logger.error(
                "Sink %s refuses %s %s: %s",
                self.name,
                order,
                gid,
                str(error).strip(),
                extra={"event": "sink_refused", "sink": self.name},
            )
            return Finished.FAILED
        return Finished.DONE
