"""Tasks and workflows that get receipts: their messages, and how batches of them are saved.

An entry has the fields `id`, `principal`, `clientId`, `sha256`, `createdAtMs` and `task`: the task as JSON.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from sqlalchemy.orm import Session

import settings
from models.errors import CeleriacError
from models.receipts import Level
from outbox.canonical_json import payload_sha
from receipts import kinds, rows
from receipts.accept import Message
from receipts.receipt import AOF_ALWAYS, COMMIT, Receipt, from_milliseconds
from receipts.save_results import Rejected, Saved, SaveResult
from receipts.streams.entries import Entry
from tasks.submission.envelope import CheckedTask, NewTask, check_task
from tasks.submission.submit import IdempotencyConflict, Submitted, id_of, submit_each

ID: Final = "id"
TASK: Final = "task"


def message_of(new: NewTask, *, principal: str, client_id: str | None, kind: str = kinds.TASKS) -> Message:
    """Return the message that accepts a task, or raise Misuse. `client_id` is the idempotency key of the client."""
    checked = check_task(new)
    id_, sha = id_of(new), payload_sha(checked.payload)
    written = {
        "type": new.type,
        "payload": new.payload,
        "key": new.key,
        "queue": checked.queue,
        "priority": checked.priority,
        "run_at": new.run_at.isoformat() if isinstance(new.run_at, datetime) else None,
        "partition_key": new.partition_key,
        "max_attempts": checked.max_attempts,
        "batch": checked.batch,  # of the handler, which the saver may not have while a new version is deployed
        "context": dict(new.context),
        "notify": new.notify,
        "expires": new.expires.isoformat() if isinstance(new.expires, datetime) else None,
    }
    fields: dict[str, str | bytes] = {
        ID: str(id_),
        "principal": principal,
        "clientId": client_id or "",
        "sha256": sha,
        TASK: json.dumps(written, ensure_ascii=False, separators=(",", ":")),
    }
    return Message(kind, id_, principal, sha, fields, client_id)


def save_now(db: Session, message: Message, new: NewTask, *, ordered: bool) -> Receipt:
    """Save a task without the receipt log, and return its receipt `saved`; raise IdempotencyConflict."""
    (found,) = submit_each(db, [(message.id, check_task(new))])
    if isinstance(found, IdempotencyConflict):
        raise found
    row = rows.Row(
        message.id, message.kind, message.sender, message.client_id, message.sha256, None, COMMIT, ordered=ordered
    )
    promise = settings.current().receipt_promise_seconds
    saved = rows.insert(db, [row], promise)[message.id]
    receipt = rows.find(db.connection(), message.id, level=Level.SAVED) if not saved.is_new else None
    return replace(receipt or rows.receipt_of(row, saved, promise), duplicate=not found.created)


def save(db: Session, entries: Sequence[Entry], of_entries: Sequence[rows.Row]) -> list[SaveResult]:
    """Write tasks, their wake-ups and their receipts into the ledger: one statement for the tasks, one for receipts."""
    given = [_read(entry, row) for entry, row in zip(entries, of_entries, strict=True)]
    once: dict[uuid.UUID, _Given] = {}  # a message may be in a batch twice; the first one counts
    for each in given:
        if isinstance(each, _Given):
            once.setdefault(each.row.id, each)
    submitted = dict(zip(once, submit_each(db, [(id_, each.checked) for id_, each in once.items()]), strict=True))
    accepted = [once[id_].row for id_, found in submitted.items() if isinstance(found, Submitted)]
    saved = rows.insert(db, accepted, settings.current().receipt_promise_seconds)
    return [_result(each, once, submitted, saved) for each in given]


def row_of(kind: str, entry: Entry) -> rows.Row:
    fields = entry.fields
    return rows.Row(
        uuid.UUID(fields[ID]),
        kind,
        fields["principal"],
        fields["clientId"] or None,
        fields["sha256"],
        from_milliseconds(fields["createdAtMs"]),
        AOF_ALWAYS,
    )


@dataclass(frozen=True, slots=True)
class _Given:
    """A task that was read from an entry."""

    row: rows.Row
    checked: CheckedTask


def _read(entry: Entry, row: rows.Row) -> _Given | Rejected:
    written = json.loads(entry.fields[TASK])
    batch = written.pop("batch", None)
    times = {name: datetime.fromisoformat(written[name]) for name in ("run_at", "expires") if written.get(name)}
    new = NewTask(**{**written, **times})
    try:
        checked = check_task(new)
    except CeleriacError as error:
        return Rejected(error.code, error.message)
    return _Given(row, checked if checked.batch else replace(checked, batch=batch))


def _result(
    given: _Given | Rejected,
    once: dict[uuid.UUID, _Given],
    submitted: dict[uuid.UUID, Submitted | IdempotencyConflict],
    saved: dict[uuid.UUID, Saved],
) -> SaveResult:
    if isinstance(given, Rejected):
        return given
    found = submitted[given.row.id]
    if isinstance(found, IdempotencyConflict) or once[given.row.id].checked.payload != given.checked.payload:
        conflict = IdempotencyConflict(given.row.id)
        return Rejected(conflict.code, conflict.message)
    result = saved[given.row.id]
    return result if result.is_new == found.created else replace(result, is_new=found.created)
