"""Tasks and workflows that get receipts: their messages, and how batches of them are saved.

An entry has the fields `id`, `principal`, `clientId`, `sha256`, `createdAtMs`, `key` (empty: none), `payload` as
canonical JSON, and `task`: everything else as JSON. The payload goes from the entry into the ledger as it is.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, NamedTuple

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
from tasks.submission.envelope import CheckedTask, NewTask, check_task, with_payload
from tasks.submission.submit import IdempotencyConflict, PreparedTasks, Submitted, id_of, submit_each, submit_prepared
from tasks.submission.submit import prepare as prepare_tasks

ID: Final = "id"
KEY: Final = "key"
PAYLOAD: Final = "payload"
TASK: Final = "task"


def message_of(new: NewTask, *, principal: str, client_id: str | None, kind: str = kinds.TASKS) -> Message:
    """Return the message that accepts a task, or raise Misuse. `client_id` is the idempotency key of the client."""
    checked = check_task(new)
    id_, sha = id_of(new), payload_sha(checked.payload)
    written = {
        "type": new.type,
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
        KEY: new.key or "",
        PAYLOAD: checked.payload,
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


class Given(NamedTuple):
    """A task that was read from an entry, or why it can never be saved."""

    row: rows.Row
    task: CheckedTask | Rejected


def read(kind: str, entries: Sequence[Entry]) -> list[Given]:
    """Read tasks. Those of one client often differ in payload and key only, so that everything else is read once."""
    known: dict[str, CheckedTask] = {}
    return [Given(row_of(kind, entry), _read(entry, known)) for entry in entries]


class Prepared(NamedTuple):
    """The tasks of a batch as parameters of the two statements that save it."""

    once: dict[uuid.UUID, CheckedTask]  # a message may be in a batch twice; the first one counts
    tasks: PreparedTasks
    rows: Sequence[rows.Row]  # of the same tasks
    receipts: Mapping[str, Any]


def prepare(given: Sequence[Given]) -> Prepared:
    once: dict[uuid.UUID, CheckedTask] = {}
    first_rows: list[rows.Row] = []
    for each in given:
        if isinstance(each.task, CheckedTask) and each.row.id not in once:
            once[each.row.id] = each.task
            first_rows.append(each.row)
    return Prepared(once, prepare_tasks(list(once.items())), first_rows, _receipts(first_rows))


def save(db: Session, given: Sequence[Given], prepared: Prepared) -> list[SaveResult]:
    """Write tasks, their wake-ups and their receipts into the ledger: one statement for the tasks, one for receipts."""
    existing = submit_prepared(db, prepared.tasks)
    accepted, receipts = prepared.rows, prepared.receipts
    if any(isinstance(found, IdempotencyConflict) for found in existing.values()):
        accepted = [row for row in accepted if not isinstance(existing.get(row.id), IdempotencyConflict)]
        receipts = _receipts(accepted)
    results = rows.insert_prepared(db, accepted, receipts) if accepted else []
    if len(results) == len(given) and not existing:
        return [*results]
    saved = {row.id: result for row, result in zip(accepted, results, strict=True)}
    return [_result(each, prepared.once, existing, saved) for each in given]


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


def _read(entry: Entry, known: dict[str, CheckedTask]) -> CheckedTask | Rejected:
    fields = entry.fields
    written = fields[TASK]
    try:
        if written not in known:
            known[written] = _check(written)
        return with_payload(known[written], fields[PAYLOAD], fields[KEY] or None)
    except CeleriacError as error:
        return Rejected(error.code, error.message)


def _check(written: str) -> CheckedTask:
    """Return a task without payload and key."""
    given = json.loads(written)
    batch = given.pop("batch", None)
    times = {name: datetime.fromisoformat(given[name]) for name in ("run_at", "expires") if given.get(name)}
    checked = check_task(NewTask(**{**given, **times}))
    return checked if checked.batch else checked._replace(batch=batch)


def _receipts(given: Sequence[rows.Row]) -> Mapping[str, Any]:
    return rows.values_of(given, settings.current().receipt_promise_seconds) if given else {}


def _result(
    given: Given,
    once: Mapping[uuid.UUID, CheckedTask],
    existing: Mapping[uuid.UUID, Submitted | IdempotencyConflict],
    saved: dict[uuid.UUID, Saved],
) -> SaveResult:
    if isinstance(given.task, Rejected):
        return given.task
    id_ = given.row.id
    found = existing.get(id_)
    if isinstance(found, IdempotencyConflict) or once[id_].payload != given.task.payload:
        conflict = IdempotencyConflict(id_)
        return Rejected(conflict.code, conflict.message)
    return saved[id_]._replace(is_new=found is None)
