"""Where a message is now, for people who hold a receipt of it: in the receipt log, in the ledger, and as a task.

The receipt log is asked before the ledger: a message that is saved in between is found in the ledger. The other way
round, it would be in neither, and look lost.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection

from models.clock import now
from models.engine import engine
from models.receipts import Level
from models.sql import sql
from models.status import TaskStatus
from receipts import kinds, rows
from receipts.errors import ReceiptLogUnreachable
from receipts.log_client import connected
from receipts.receipt import Receipt
from receipts.status import receipt_of_claim

UPLOAD_SECONDS: Final = 10  # that storing an upload takes at most
TASK: Final = sql("SELECT id, type, status FROM ledger.ingest_task WHERE id = :id")
# of_upload: the receipt of the upload that made a task. It has another id, and no index leads to it from the task; but
# both are written by one transaction.
OF_UPLOAD: Final = sql(f"""
    SELECT {rows.COLUMNS}, seq, saved_at, code, reason FROM ledger.receipt
    WHERE saved_at BETWEEN :created_at AND CAST(:created_at AS timestamptz) + make_interval(secs => {UPLOAD_SECONDS})
      AND task_id = :id
    ORDER BY seq LIMIT 1
""")


@dataclass(frozen=True, slots=True)
class TaskNow:
    """The task that a message has become."""

    id: uuid.UUID
    type: str
    status: TaskStatus


@dataclass(frozen=True, slots=True)
class Custody:
    """What each place knows about one message."""

    at: datetime
    saved: Receipt | None  # in the ledger
    rejected: Receipt | None  # in the ledger; also if another payload under the same id was saved
    task: TaskNow | None
    claim: Receipt | None  # in the receipt log
    log_answers: bool

    def ending_of(self, level: str, sha256: str | None) -> Receipt | None:
        """Return the receipt in the ledger for this payload, best of the same level, else any that it has for the id.

        The same payload can have both: it was rejected, and submitted again after the cause was removed.
        """
        found = [each for each in (self.saved, self.rejected) if each is not None]
        found.sort(key=lambda each: (each.sha256 != sha256, each.level != level))
        return found[0] if found else None


def read_custody(id_: uuid.UUID, *, answer_seconds: float) -> Custody:
    """Ask the receipt log and then the ledger. That the log does not answer is part of the result."""
    claim, log_answers = None, True
    try:
        with connected(answer_seconds=answer_seconds) as client:
            claim = client.hgetall(kinds.claim_key(id_))
    except ReceiptLogUnreachable:
        log_answers = False
    with engine().connect() as connection:
        saved, rejected = (rows.find(connection, id_, level=level) for level in (Level.SAVED, Level.REJECTED))
        task = _find_task(connection, saved.task_id if saved is not None and saved.task_id else id_)
        at = now(connection)
    return Custody(at, saved, rejected, task, receipt_of_claim(id_, claim) if claim else None, log_answers)


def find_of_upload(connection: Connection, task_id: uuid.UUID, created_at: datetime) -> Receipt | None:
    """Return the receipt of the upload that made this task, or None."""
    row = connection.execute(OF_UPLOAD, {"id": task_id, "created_at": created_at}).one_or_none()
    return rows.receipt_of_row(row) if row else None


def _find_task(connection: Connection, id_: uuid.UUID) -> TaskNow | None:
    row = connection.execute(TASK, {"id": id_}).one_or_none()
    return TaskNow(row.id, row.type, TaskStatus(row.status)) if row else None
