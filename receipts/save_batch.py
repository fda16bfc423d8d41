"""Save a batch of entries: each of them ends with a receipt `saved` or `rejected`.

Both are written by the transaction of the batch. If the batch fails because of an entry, it is saved in halves, so that
one bad entry does not stop the others. An outage, a lock or a lost shard says nothing about the entries: it is raised,
and the batch is saved again later. Any program may have written an entry, so whatever reading it raises is the fault of
the entry.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

import settings
from models.driver_values import storable
from models.errors import CeleriacError, LeaseLost, LedgerBusy, Unreachable
from models.guarded_session import GuardedSession
from models.ledger_outage import asks_to_repeat, is_outage
from models.receipts import Level
from receipts import kinds, rows
from receipts.receipt import AOF_ALWAYS, Receipt, from_milliseconds
from receipts.save_results import Rejected, Saved, SaveResult
from receipts.streams.entries import Entry
from tasks.core.task_ids import keyed_id
from tasks.submission.closed_queues import tasks_are_accepted

logger = logging.getLogger(__name__)

BAD_ENTRY: Final = "bad_entry"
NOT_STORABLE: Final = "not_storable"
SHOWN_CHARACTERS: Final = 10_000  # of each field of an entry that was rejected
REASON_CHARACTERS: Final = 1000
UNKNOWN: Final = "unknown"
PROGRAM_LIMITS: Final = "54"  # a class of SQLSTATEs, such as: a value is too long for an index
# What reading an entry may raise: fields that miss, JSON of another shape or nested too deeply, times out of range.
UNREADABLE: Final = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class Settled(NamedTuple):
    """What became of an entry. `given` is what its kind has read from it, or None if it cannot be read."""

    entry: Entry
    given: Any
    row: rows.Row
    saved: Saved  # or rejected: the number and the time of the receipt
    rejected: Rejected | None = None

    @property
    def level(self) -> Level:
        return Level.REJECTED if self.rejected else Level.SAVED

    @property
    def is_new(self) -> bool:
        """Return False if the entry was saved before this batch."""
        return self.saved.is_new

    @property
    def receipt(self) -> Receipt:
        receipt = rows.receipt_of(self.row, self.saved, settings.current().receipt_promise_seconds)
        if self.rejected is None:
            return receipt
        return replace(receipt, level=Level.REJECTED, code=self.rejected.code, reason=self.rejected.reason)


class ReadBatch(NamedTuple):
    """What entries say, and what can be computed of it before the transaction that saves them."""

    given: Sequence[Any]
    prepared: Any


def read_batch(kind: str, entries: Sequence[Entry]) -> ReadBatch | None:
    """Return what entries of one kind say, or None if one of them cannot be read."""
    try:
        return _read(kind, entries)
    except (CeleriacError, *UNREADABLE):
        return None


def save_batch(db: GuardedSession, kind: str, entries: Sequence[Entry], read: ReadBatch | None = None) -> list[Settled]:
    """Save entries of one kind in the transaction of `db`, and reject those that can never be saved.

    `read` is what `read_batch` returned for them, if they were read beforehand.
    """
    if not entries:
        return []
    given: Sequence[Any] = ()
    try:
        given, prepared = _read(kind, entries) if read is None else read
        with db.begin_nested(), tasks_are_accepted():
            results = kinds.saver_of(kind).save(db, given, prepared)
            return [_settle(db, *each) for each in zip(entries, given, results, strict=True)]
    except Exception as error:
        if not _is_fault_of_an_entry(error):
            raise
        if len(entries) == 1:
            row, (one,) = _row_of(kind, entries[0]), given or (None,)
            return [_reject(db, entries[0], one, row, _rejected(error))]
        middle = len(entries) // 2
        return [*save_batch(db, kind, entries[:middle]), *save_batch(db, kind, entries[middle:])]


def _read(kind: str, entries: Sequence[Entry]) -> ReadBatch:
    saver = kinds.saver_of(kind)
    given = saver.read(kind, entries)
    return ReadBatch(given, saver.prepare(given))


def _settle(db: GuardedSession, entry: Entry, given: Any, result: SaveResult) -> Settled:
    if isinstance(result, Saved):
        return Settled(entry, given, given.row, result)
    return _reject(db, entry, given, given.row, result)


def _reject(db: GuardedSession, entry: Entry, given: Any, row: rows.Row, result: Rejected) -> Settled:
    promise = settings.current().receipt_promise_seconds
    row = _storable_row(row)
    shown = {storable(name): storable(value[:SHOWN_CHARACTERS]) for name, value in entry.fields.items()}
    code, reason = result.code, storable(result.reason)[:REASON_CHARACTERS]
    seq, at = rows.reject(db, row, promise, code=code, reason=reason, entry=shown, notify=_notify_of(entry))
    fields = {"event": "receipt_rejected", "code": result.code, "kind": row.kind}
    logger.error("The message %s was rejected: %s", row.id, reason, extra=fields)
    return Settled(entry, given, row, Saved(seq, at), Rejected(code, reason))


def _is_fault_of_an_entry(error: Exception) -> bool:
    if isinstance(error, LeaseLost | LedgerBusy | Unreachable) or is_outage(error) or asks_to_repeat(error):
        return False
    if isinstance(error, DBAPIError):
        return _is_not_storable(error)
    return isinstance(error, (CeleriacError, *UNREADABLE))


def _is_not_storable(error: DBAPIError) -> bool:
    state = getattr(error.orig, "pgcode", None) or ""
    return isinstance(error, DataError | IntegrityError) or state.startswith(PROGRAM_LIMITS)


def _rejected(error: Exception) -> Rejected:
    match error:
        case CeleriacError():
            return Rejected(error.code, error.message)
        case DBAPIError():
            return Rejected(NOT_STORABLE, f"PostgreSQL cannot store it: {str(error.orig).partition(chr(10))[0]}.")
    return Rejected(BAD_ENTRY, f"The entry cannot be read: {type(error).__name__} {str(error).rstrip('.')}.")


def _row_of(kind: str, entry: Entry) -> rows.Row:
    """Return what the receipt says, also for an entry that was not written by `accept`."""
    try:
        return kinds.saver_of(kind).row_of(kind, entry)
    except (CeleriacError, *UNREADABLE):
        id_ = keyed_id("entry", f"{kind} {entry.id}")
        return rows.Row(id_, kind, UNKNOWN, None, UNKNOWN, _time_of(entry), AOF_ALWAYS)


def _time_of(entry: Entry) -> datetime:
    """Return when an entry was added. Its id may have been chosen by the program that added it."""
    now = datetime.now(UTC)
    try:
        return min(from_milliseconds(entry.id.partition("-")[0]), now)
    except ValueError:
        return now


def _storable_row(row: rows.Row) -> rows.Row:
    client_id = None if row.client_id is None else storable(row.client_id)
    return row._replace(principal=storable(row.principal), client_id=client_id, sha256=storable(row.sha256))


def _notify_of(entry: Entry) -> str | None:
    """Return the destination that an entry asks to notify, if there is such a destination."""
    try:
        given = json.loads(entry.fields["task"]).get("notify")
    except UNREADABLE:
        return None
    return given if isinstance(given, str) and given in settings.current().outbox_destinations else None
