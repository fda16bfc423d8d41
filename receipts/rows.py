"""The statements about `receipt`: the receipts of what was saved, and of what never can be."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection

from models.driver_values import array, array_of_ids
from models.receipts import Level
from models.sql import sql
from outbox.lease import Db, connection_of
from receipts.receipt import Receipt
from receipts.save_results import Saved

# A receipt is inserted from these arrays; the columns are those of `Row`.
GIVEN: Final = """
    unnest(CAST(:ids AS uuid[]), CAST(:principals AS text[]), CAST(:client_ids AS text[]), CAST(:shas AS text[]),
           CAST(:accepted_ats AS timestamptz[]), CAST(:task_ids AS uuid[]))
        WITH ORDINALITY AS given(id, principal, client_id, payload_sha, accepted_at, task_id, place)
"""
COLUMNS: Final = (
    "id, level, kind, principal, client_id, payload_sha, policy, is_ordered, task_id, accepted_at, promised_by"
)


def insert_saved(source: str, after: str = "") -> str:
    """Return a CTE that inserts receipts `saved` for the rows of `source`, in their order.

    `source` has the columns of GIVEN; `after` is a condition that it must also meet. A receipt that exists stays as it
    is, and is not in `receipts`. The statement needs a CTE `clock`.
    """
    return f"""
        receipts AS (
            INSERT INTO ledger.receipt ({COLUMNS}, saved_at)
            SELECT id, '{Level.SAVED}', :kind, principal, client_id, payload_sha, :policy, :is_ordered,
                   task_id, coalesce(accepted_at, at), coalesce(accepted_at, at) + make_interval(secs => :promise), at
            FROM {source} CROSS JOIN clock {after} ORDER BY place
            ON CONFLICT (id, level) DO NOTHING
            RETURNING seq, id, saved_at, task_id)"""


# save: → saved. A task with a destination to notify tells it. The answer is one row, because reading a row for each
# receipt takes longer: when they were saved, their numbers, and their ids if some of them existed already.
INSERT_SAVED: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    {insert_saved(GIVEN)},
    notified AS (
        INSERT INTO ledger.outbox_event (destination, payload, created_at)
        SELECT notify, jsonb_build_object('taskId', id, 'type', type, 'level', '{Level.SAVED}', 'ledgerSeq', seq), at
        FROM receipts JOIN ledger.ingest_task USING (id) CROSS JOIN clock WHERE notify IS NOT NULL)
    SELECT at, array_agg(seq ORDER BY seq),
           CASE WHEN count(seq) < cardinality(CAST(:ids AS uuid[])) THEN array_agg(CAST(id AS text) ORDER BY seq) END
    FROM clock LEFT JOIN receipts ON true GROUP BY at
""")
# reject: → rejected. If it was rejected before, the newest reason stays. The same entry is rejected again after a crash
# of the saver; a destination is notified once.
INSERT_REJECTED: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    known AS MATERIALIZED (
        SELECT FROM ledger.receipt WHERE id = :id AND level = '{Level.REJECTED}' AND accepted_at = :accepted_at),
    rejected AS (
        INSERT INTO ledger.receipt ({COLUMNS}, saved_at, code, reason, entry)
        SELECT :id, '{Level.REJECTED}', :kind, :principal, :client_id, :sha, :policy, :is_ordered, NULL,
               coalesce(:accepted_at, at), coalesce(:accepted_at, at) + make_interval(secs => :promise), at,
               :code, :reason, CAST(:entry AS jsonb)
        FROM clock
        ON CONFLICT (id, level) DO UPDATE
        SET code = excluded.code, reason = excluded.reason, entry = excluded.entry, saved_at = excluded.saved_at,
            payload_sha = excluded.payload_sha, accepted_at = excluded.accepted_at, promised_by = excluded.promised_by
        RETURNING seq, saved_at),
    notified AS (
        INSERT INTO ledger.outbox_event (destination, payload, created_at)
        SELECT :notify, jsonb_build_object('taskId', CAST(:id AS uuid), 'level', '{Level.REJECTED}',
                                           'code', CAST(:code AS text), 'reason', CAST(:reason AS text)), at
        FROM clock WHERE CAST(:notify AS text) IS NOT NULL AND NOT EXISTS (SELECT FROM known))
    SELECT seq, saved_at FROM rejected
""")
SAVED: Final = sql(f"""
    SELECT id, seq, saved_at, task_id FROM ledger.receipt
    WHERE id = ANY(CAST(:ids AS uuid[])) AND level = '{Level.SAVED}'
""")
# The receipt of an id. If another payload under the same id was rejected, the one that was saved counts.
FIND: Final = sql(f"""
    SELECT {COLUMNS}, seq, saved_at, code, reason FROM ledger.receipt
    WHERE id = :id AND (CAST(:level AS text) IS NULL OR level = :level)
    ORDER BY level = 'saved' DESC, seq DESC LIMIT 1
""")
LIST: Final = sql(f"""
    SELECT {COLUMNS}, seq, saved_at, code, reason, entry FROM ledger.receipt
    WHERE (CAST(:level AS text) IS NULL OR level = :level) AND (CAST(:before AS bigint) IS NULL OR seq < :before)
    ORDER BY seq DESC LIMIT :limit
""")


class Row(NamedTuple):
    """What a receipt says about a message, apart from its level. There is one per message, so it must be made fast."""

    id: uuid.UUID
    kind: str
    principal: str
    client_id: str | None
    sha256: str
    accepted_at: datetime | None  # None: saved at once, so it was accepted when it was saved
    policy: str
    ordered: bool = True
    task_id: uuid.UUID | None = None  # if it is another one than `id`


@dataclass(frozen=True, slots=True)
class ListedReceipt:
    """A receipt of the ledger, with the entry that was rejected."""

    receipt: Receipt
    entry: Any


def values_of(rows: Sequence[Row], promise_seconds: float) -> dict[str, Any]:
    """Return the parameters of a statement with GIVEN. All rows are of one kind, one policy and one order."""
    return {
        "ids": array_of_ids(row.id for row in rows),
        "principals": array(row.principal for row in rows),
        "client_ids": array(row.client_id for row in rows),
        "shas": array(row.sha256 for row in rows),
        "accepted_ats": array(row.accepted_at and row.accepted_at.isoformat() for row in rows),
        "task_ids": array(row.task_id for row in rows),
        "promise": promise_seconds,
        "kind": rows[0].kind,
        "policy": rows[0].policy,
        "is_ordered": rows[0].ordered,
    }


def insert(db: Db, rows: Sequence[Row], promise_seconds: float) -> dict[uuid.UUID, Saved]:
    """Insert receipts `saved`, and return all of them, also those that exist already."""
    if not rows:
        return {}
    found = insert_prepared(db, rows, values_of(rows, promise_seconds))
    return {row.id: saved for row, saved in zip(rows, found, strict=True)}


def insert_prepared(db: Db, rows: Sequence[Row], values: Mapping[str, Any]) -> list[Saved]:
    """Do the same with what `values_of` returned for these rows, whose ids must not repeat. Keep their order."""
    saved_at, seqs, ids = connection_of(db).execute(INSERT_SAVED, values).one()
    if ids is None:
        return [Saved(seq, saved_at, task_id=row.task_id) for row, seq in zip(rows, seqs, strict=True)]
    of_ids = {row.id: row for row in rows}
    new = [of_ids[uuid.UUID(id_)] for id_ in ids if id_ is not None]
    found = {row.id: Saved(seq, saved_at, task_id=row.task_id) for row, seq in zip(new, seqs, strict=False)}
    found |= read_saved(db, [row.id for row in rows if row.id not in found])
    return [found[row.id] for row in rows]


def read_saved(db: Db, ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, Saved]:
    """Return the receipts `saved` of these ids."""
    if not ids:
        return {}
    known = connection_of(db).execute(SAVED, {"ids": array_of_ids(ids)})
    return {id_: Saved(seq, saved_at, is_new=False, task_id=task_id) for id_, seq, saved_at, task_id in known}


def reject(
    db: Db, row: Row, promise_seconds: float, *, code: str, reason: str, entry: Any, notify: str | None = None
) -> tuple[int, datetime]:
    """Record that a message can never be saved, with the message itself. Return number and time of its receipt.

    All texts must be storable.
    """
    values = {
        "id": row.id,
        "kind": row.kind,
        "principal": row.principal,
        "client_id": row.client_id,
        "sha": row.sha256,
        "policy": row.policy,
        "is_ordered": row.ordered,
        "accepted_at": row.accepted_at,
        "promise": promise_seconds,
        "code": code,
        "reason": reason,
        "entry": json.dumps(entry),
        "notify": notify,
    }
    seq, saved_at = connection_of(db).execute(INSERT_REJECTED, values).one()
    return seq, saved_at


def receipt_of(row: Row, saved: Saved, promise_seconds: float) -> Receipt:
    """Return the receipt `saved` of a row that was just inserted."""
    accepted_at = row.accepted_at or saved.saved_at
    return Receipt(
        Level.SAVED,
        row.id,
        row.kind,
        row.principal,
        row.sha256,
        accepted_at,
        accepted_at + timedelta(seconds=promise_seconds),
        row.client_id,
        row.policy,
        ordered=row.ordered,
        saved_at=saved.saved_at,
        ledger_seq=saved.seq,
        task_id=saved.task_id,
    )


def find(connection: Connection, id_: uuid.UUID, *, level: Level | None = None) -> Receipt | None:
    """Return the newest receipt of a message, or the one of a level; None if there is none."""
    row = connection.execute(FIND, {"id": id_, "level": level and level.value}).one_or_none()
    return None if row is None else receipt_of_row(row)


def list_receipts(
    connection: Connection, *, level: Level | None, before: int | None, limit: int
) -> list[ListedReceipt]:
    """Return receipts, newest first."""
    values = {"level": level and level.value, "before": before, "limit": limit}
    return [ListedReceipt(receipt_of_row(row), row.entry) for row in connection.execute(LIST, values)]


def receipt_of_row(row: Any) -> Receipt:
    """Return the receipt of a row with COLUMNS, seq, saved_at, code and reason."""
    return Receipt(
        Level(row.level),
        row.id,
        row.kind,
        row.principal,
        row.payload_sha,
        row.accepted_at,
        row.promised_by,
        row.client_id,
        row.policy,
        ordered=row.is_ordered,
        saved_at=row.saved_at,
        ledger_seq=row.seq,
        code=row.code,
        reason=row.reason,
        task_id=row.task_id,
    )
