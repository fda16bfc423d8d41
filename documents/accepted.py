"""Uploads that get receipts: their messages, and how they are saved (a `Saver`, see `receipts/kinds.py`).

An entry has the fields `id`, `principal`, `clientId`, `sha256` (of the file), `createdAtMs`, `name`, `mediaType` and
`content`. The task of an upload depends on the revision that it becomes, so its id is known when it is saved.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sqlalchemy.orm import Session

import settings
from documents.store import upload
from models.receipts import Level
from receipts import kinds, rows
from receipts.accept import Message
from receipts.receipt import AOF_ALWAYS, COMMIT, Receipt, from_milliseconds
from receipts.save_results import Rejected, SaveResult
from receipts.streams.entries import Entry
from tasks import IdempotencyConflict


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that a principal uploads. `client_id` is the idempotency key of the client."""

    principal: str
    name: str
    content: bytes
    media_type: str | None
    id: uuid.UUID
    client_id: str | None = None

    @classmethod
    def of(cls, principal: str, name: str, content: bytes, media_type: str | None, key: str | None) -> Upload:
        return cls(principal, name, content, media_type, kinds.message_id(kinds.DOCUMENTS, principal, key), key)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def message(self) -> Message:
        """Return the message to accept."""
        fields: dict[str, str | bytes] = {
            "id": str(self.id),
            "principal": self.principal,
            "clientId": self.client_id or "",
            "sha256": self.sha256,
            "name": self.name,
            "mediaType": self.media_type or "",
            "content": self.content,
        }
        return Message(kinds.DOCUMENTS, self.id, self.principal, self.sha256, fields, self.client_id)


def row_of(kind: str, entry: Entry) -> rows.Row:
    fields = entry.fields
    return rows.Row(
        uuid.UUID(fields["id"]),
        kind,
        fields["principal"],
        fields["clientId"] or None,
        fields["sha256"],
        from_milliseconds(fields["createdAtMs"]),
        AOF_ALWAYS,
    )


class Given(NamedTuple):
    """An upload that was read from an entry."""

    row: rows.Row
    upload: Upload


def read(kind: str, entries: Sequence[Entry]) -> list[Given]:
    return [Given(row_of(kind, entry), _read(entry)) for entry in entries]


def prepare(_given: Sequence[Given]) -> None:
    """Prepare nothing: each document has statements of its own."""


def save(db: Session, given: Sequence[Given], _prepared: None) -> list[SaveResult]:
    """Store documents one after the other, as their order decides about revisions."""
    return [_save(db, each.upload, each.row) for each in given]


def save_now(db: Session, given: Upload, *, ordered: bool) -> Receipt:
    """Save an upload without the receipt log, and return its receipt `saved`; raise IdempotencyConflict."""
    row = rows.Row(
        given.id, kinds.DOCUMENTS, given.principal, given.client_id, given.sha256, None, COMMIT, ordered=ordered
    )
    saved = _save(db, given, row)
    if isinstance(saved, Rejected):
        raise IdempotencyConflict(given.id)
    receipt = rows.receipt_of(row, saved, settings.current().receipt_promise_seconds)
    if saved.is_new:
        return receipt
    return replace(rows.find(db.connection(), given.id, level=Level.SAVED) or receipt, duplicate=True)


def _save(db: Session, given: Upload, row: rows.Row) -> SaveResult:
    """Store an upload unless it was stored before: a newer file may have replaced it meanwhile."""
    known = rows.find(db.connection(), given.id, level=Level.SAVED)
    if known is not None:
        if known.sha256 != given.sha256:
            return Rejected(IdempotencyConflict.code, IdempotencyConflict(given.id).message)
        return rows.read_saved(db, [given.id])[given.id]
    submitted = upload(
        db, name=given.name, content=given.content, media_type=given.media_type, principal=given.principal
    )
    row = row._replace(task_id=submitted.task_id)
    return rows.insert(db, [row], settings.current().receipt_promise_seconds)[given.id]


def _read(entry: Entry) -> Upload:
    fields = entry.fields
    content = fields["content"].encode(errors="surrogateescape")
    media_type, client_id = fields["mediaType"] or None, fields["clientId"] or None
    return Upload(fields["principal"], fields["name"], content, media_type, uuid.UUID(fields["id"]), client_id)
