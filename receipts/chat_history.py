"""What a user may have missed, from the ledger, with a cursor that cannot skip anything.

A row has the id of the transaction that wrote it (`transaction_id`). Ids of transactions do not follow the order of
commits: 7 may commit after 8 was read. So the cursor is the oldest transaction that was running when the ledger was
read. Every row of an older one was visible then, and was sent; everything else is read again from the cursor on.

    no cursor          nothing is sent; the client gets a cursor to start from
    a cursor           all rows from that transaction on, page by page; each page comes with a cursor
    the read before    only what was not visible to it, even if an old transaction keeps the cursor back for hours

A page is a read of its own, and rows that are committed meanwhile may belong to a page that was sent already. So the
cursor never passes what was running at the first page, and those rows are found by the next read.

The cursor belongs to one PostgreSQL server. If the ledger was restored elsewhere, a cursor may be ahead of all
transactions; it is then refused with BadCursor.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection

from models.errors import Misuse
from models.receipts import Level
from models.sql import sql
from receipts import frames, rows
from receipts.chat_messages import ChatMessage

LARGEST_CURSOR: Final = 2**63 - 1
_XMIN: Final = "CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint)"
_XMAX: Final = "CAST(CAST(pg_snapshot_xmax(pg_current_snapshot()) AS text) AS bigint)"
_RECEIPT: Final = ", ".join(f"receipt.{name.strip()}" for name in rows.COLUMNS.split(",") if name.strip() != "id")


def _half(column: str, *, is_own: bool) -> str:
    """Return a query for the messages of the user as sender or as receiver; each half has an index.

    Messages of one transaction are in the order of their receipts, which is that of the stream.
    """
    place = f"(message.transaction_id, coalesce(receipt.seq, 0), message.id, {is_own})"
    return f"""
        (SELECT message.id, message.transaction_id, coalesce(receipt.seq, 0) AS place, {is_own} AS is_own,
                client_msg_id, from_user_id, to_user_id, msg_type, {"''" if is_own else "body"} AS body,
                {_RECEIPT}, receipt.seq, receipt.saved_at, receipt.code, receipt.reason
         FROM ledger.chat_message message
         LEFT JOIN ledger.receipt ON receipt.id = message.id AND receipt.level = '{Level.SAVED}'
         WHERE message.{column} = :user AND message.transaction_id >= :first AND message.transaction_id < {_XMAX}
           AND (CAST(:seen AS pg_snapshot) IS NULL OR NOT pg_visible_in_snapshot(
                    CAST(CAST(message.transaction_id AS text) AS xid8), CAST(:seen AS pg_snapshot)))
           AND (CAST(:after_id AS uuid) IS NULL
                OR {place} > (:first, CAST(:after_place AS bigint), CAST(:after_id AS uuid), :after_is_own))
         ORDER BY transaction_id, place, id LIMIT :limit)"""


_NOW: Final = f"SELECT {_XMIN} AS xmin, {_XMAX} AS xmax, CAST(pg_current_snapshot() AS text) AS snapshot"
# read_missed: a page, and what was visible to it. One row more tells whether there is another page; if there is no row
# at all, its columns are NULL.
MISSED: Final = sql(f"""
    WITH page AS MATERIALIZED (
        {_half("to_user_id", is_own=False)}
        UNION ALL
        {_half("from_user_id", is_own=True)}
        ORDER BY transaction_id, place, id, is_own LIMIT :limit)
    SELECT * FROM ({_NOW}) now LEFT JOIN page ON true ORDER BY transaction_id, place, id, is_own
""")
START: Final = sql(_NOW)


class BadCursor(Misuse):
    """The cursor cannot be used.

    It is not a number, or it is ahead of the ledger, which happens if the ledger was restored on another server.
    """

    code = "bad_cursor"
    remedy = "Connect without a cursor, and read the chats again from their beginning."


class _Place(NamedTuple):
    """The last message of a page."""

    transaction_id: int
    place: int
    id: uuid.UUID
    is_own: bool


@dataclass(frozen=True, slots=True)
class Missed:
    """A page of what a user has missed.

    `frames` are in order; receipts in them are not signed yet. `cursor` is where a client may start again that has
    received them. If the page is not the last one, `after` reads the next one.
    """

    frames: Sequence[dict[str, Any]]
    cursor: int
    is_complete: bool
    _xmin: int  # the oldest running transaction at the first page
    _snapshot: str  # what was visible to the first page
    _seen: str | None  # what was visible to the last complete read, and is not read again
    _last: _Place | None = None  # where the next page begins; None: there is none


def read_missed(
    connection: Connection, user: str, cursor: int | None, limit: int, *, after: Missed | None = None
) -> Missed:
    """Return what a user has missed since the cursor, or since `after`: the page before, or the whole read before."""
    if after is None and cursor is None:
        now = connection.execute(START).one()
        return Missed((), now.xmin, True, now.xmin, now.snapshot, now.snapshot)
    last, seen = (after._last, after._seen) if after is not None else (None, None)
    first = last.transaction_id if last else after.cursor if after is not None else cursor
    values = {
        "user": user,
        "first": first,
        "seen": seen,
        "after_place": last and last.place,
        "after_id": last and last.id,
        "after_is_own": last and last.is_own,
        "limit": limit + 1,
    }
    found = connection.execute(MISSED, values).all()
    now = found[0]
    if after is None and cursor is not None and cursor > now.xmax:
        raise BadCursor("The cursor is ahead of the ledger, which was probably restored on another server.")
    xmin, snapshot = (after._xmin, after._snapshot) if after is not None and last else (now.xmin, now.snapshot)
    made = tuple(_frame(row) for row in found[:limit] if row.id is not None)
    if len(found) <= limit:
        return Missed(made, xmin, True, xmin, snapshot, snapshot)
    end = found[limit - 1]
    place = _Place(end.transaction_id, end.place, end.id, end.is_own)
    return Missed(made, min(xmin, place.transaction_id), False, xmin, snapshot, seen, place)


def _frame(row: Any) -> dict[str, Any]:
    """Return the message for its receiver, or its receipt for its sender. Old receipts are pruned."""
    message = ChatMessage(row.from_user_id, row.to_user_id, row.client_msg_id, row.body, row.msg_type)
    if not row.is_own:
        return frames.message_frame(message)
    if row.seq is None:
        return frames.acknowledgement(message, Level.SAVED)
    return frames.receipt_frame(message, rows.receipt_of_row(row))
