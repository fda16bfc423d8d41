"""The audit of the outbox: the outcome of each attempt, by code.

Every outcome is counted and written to `outbox_audit`. Successes are written by the statement that marks the events as
SENT (outbox/lease_statements.py): one row for each event, and for wake-ups one row for each batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from models.errors import Unreachable
from models.sql import sql
from tally import counts as tally
from tally.subjects import Subject

logger = logging.getLogger(__name__)


class AuditCode(StrEnum):
    """The codes in `outbox_audit` and in the metric; see docs/protocol.md, Codes."""

    SUCCESS = "outbox_flush_success"
    RETRY = "outbox_flush_retry"
    DEAD = "outbox_flush_dead"
    CONFLICT = "outbox_flush_conflict"
    DEDUP_HIT = "outbox_flush_dedup_hit"
    PAUSED = "outbox_flush_paused"
    DB_TIMEOUT = "outbox_flush_db_timeout"
    DB_ERROR = "outbox_flush_db_error"


QUERY_CANCELED: Final = "57014"
DATABASE_ERRORS: Final = (DBAPIError, Unreachable)

AUDIT: Final = sql("""
    INSERT INTO ledger.outbox_audit (outbox_id, code, worker_id, detail)
    SELECT id, :code, :worker_id, detail
    FROM unnest(CAST(:ids AS bigint[]), CAST(:details AS text[])) AS given(id, detail)
""")

# The detail describes the row as it is now: another worker holds it or has finished it, or it is gone.
AUDIT_CONFLICTS: Final = sql("""
    INSERT INTO ledger.outbox_audit (outbox_id, code, worker_id, detail)
    SELECT given.id, :code, :worker_id,
           CASE WHEN e.id IS NULL THEN 'the event is gone'
                ELSE format('%s: now %s, held by %s until %s', CAST(:during AS text), e.status,
                            coalesce(e.locked_by, 'no worker'), coalesce(e.lease_until::text, '-')) END
    FROM unnest(CAST(:ids AS bigint[])) AS given(id) LEFT JOIN ledger.outbox_event e USING (id)
""")


def count(code: AuditCode, how_many: int = 1) -> None:
    """Count it in the tally, from which `celeriac_outbox_flush_total` is read."""
    tally.count(Subject.FLUSH, code, how_many)


def write(connection: Connection, code: AuditCode, details: Mapping[int | None, str], *, worker_id: str) -> None:
    """Write one audit row per event id. The id None is for an error that concerns no single event."""
    if details:
        values = {"ids": list(details), "details": list(details.values()), "code": code, "worker_id": worker_id}
        connection.execute(AUDIT, values)


def write_conflicts(connection: Connection, ids: Sequence[int], during: str, *, worker_id: str) -> None:
    """Write one audit row per lost lease."""
    if ids:
        values = {"ids": ids, "during": during, "code": AuditCode.CONFLICT, "worker_id": worker_id}
        connection.execute(AUDIT_CONFLICTS, values)


def code_of(error: Exception) -> AuditCode:
    """Return the code of a database error: a statement that was cancelled took too long."""
    is_timeout = isinstance(error, DBAPIError) and getattr(error.orig, "pgcode", None) == QUERY_CANCELED
    return AuditCode.DB_TIMEOUT if is_timeout else AuditCode.DB_ERROR


@dataclass(frozen=True, slots=True)
class _Noted:
    """An error of the database that is not audited yet."""

    sentence: str
    first_at: float
    count: int = 1

    @property
    def detail(self) -> str:
        seconds = time.monotonic() - self.first_at
        return f"{self.sentence} (number of errors: {self.count}; the first was {seconds:.0f} s before this entry)"


class DatabaseErrors:
    """The database errors of one publisher: counted at once, audited when the database answers again.

    Only the first one since then is logged, because a relay meets an outage again every second.
    """

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self._unwritten: dict[AuditCode, _Noted] = {}

    @property
    def are_unwritten(self) -> bool:
        return bool(self._unwritten)

    def note(self, error: Exception) -> None:
        """Count an error, and keep it for the audit: one entry per code, with the latest message."""
        code, sentence = code_of(error), str(error).partition("\n")[0]
        count(code)
        if code not in self._unwritten:
            logger.error("%s: %s", code, sentence, extra={"event": "outbox_database_error", "code": str(code)})
        earlier = self._unwritten.get(code, _Noted(sentence, time.monotonic(), 0))
        self._unwritten[code] = replace(earlier, sentence=sentence, count=earlier.count + 1)

    def write(self, engine: Engine) -> None:
        """Audit the errors that were noted. If the database still does not answer, raise and keep them."""
        if self._unwritten:
            with engine.begin() as connection:
                for code, noted in self._unwritten.items():
                    write(connection, code, {None: noted.detail}, worker_id=self.worker_id)
            self._unwritten.clear()
