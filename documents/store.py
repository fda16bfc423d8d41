"""Documents in the ledger: the row says which revision is current, and whoever writes asks it in the same transaction.

    upload           new → revision 1; changed → the next revision; as it was → nothing. Each revision has one task.
    replace_chunks   the chunks of a document become those of a revision, while no upload can make it an old one

An upload waits for another of the same name, and for the end of a `replace_chunks`; so the last to commit is current.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import settings
from documents.chunks import Chunk
from documents.file_types import media_type_of
from models.errors import Misuse
from models.sql import sql
from models.status import TaskStatus
from outbox.lease import Db, connection_of
from tasks.core.outcomes import Discard, storable
from tasks.submission.submit import Submitted, submit

TYPE: Final = "document.ingest"
LONGEST_NAME: Final = 1000  # bytes: an index holds it

# put: → revision 1, or the next one; no row if nothing has changed, and then it is locked all the same.
PUT: Final = sql("""
    INSERT INTO ledger.document (name, media_type, sha256, content, size_bytes, created_at, updated_at)
    SELECT :name, :media_type, :sha256, :content, :size_bytes, at, at FROM (SELECT ledger.ledger_now() AS at) AS clock
    ON CONFLICT (name) DO UPDATE
    SET media_type = excluded.media_type, sha256 = excluded.sha256, content = excluded.content,
        size_bytes = excluded.size_bytes, updated_at = excluded.updated_at, revision = document.revision + 1
    WHERE (document.sha256, document.media_type) IS DISTINCT FROM (excluded.sha256, excluded.media_type)
    RETURNING id, revision
""")
CURRENT_OF_NAME: Final = sql("SELECT id, revision FROM ledger.document WHERE name = :name")

# once_more: the next revision with the same content.
ONCE_MORE: Final = sql("""
    UPDATE ledger.document SET revision = revision + 1, updated_at = (SELECT ledger.ledger_now()) WHERE id = :id RETURNING revision
""")

READ: Final = sql("""
    SELECT name, media_type, content FROM ledger.document WHERE id = :id AND revision = :revision
""")
IS_CURRENT: Final = sql("SELECT count(*) FROM ledger.document WHERE id = :id AND revision = :revision")

# hold: no upload changes the document before this transaction ends; no row if one already has.
HOLD: Final = sql("SELECT 1 FROM ledger.document WHERE id = :id AND revision = :revision FOR SHARE")
FORGET_CHUNKS: Final = sql("DELETE FROM ledger.document_chunk WHERE document_id = :id")
ADD_CHUNKS: Final = sql("""
    INSERT INTO ledger.document_chunk (document_id, position, text)
    SELECT :id, place - 1, text FROM unnest(CAST(:texts AS text[])) WITH ORDINALITY AS given(text, place)
""")

DEATHS: Final = sql("""
    SELECT id, error_message FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[])) AND status = 'DEAD'
""")


class DocumentTooLarge(Misuse):
    """The document is too large."""

    code = "document_too_large"
    http_status = 413


class BadDocumentName(Misuse):
    """A document needs a name."""

    code = "bad_document_name"


@dataclass(frozen=True, slots=True)
class Stored:
    """A document as it was uploaded."""

    name: str
    media_type: str
    content: bytes


def upload(session: Db, *, name: str, content: bytes, media_type: str | None = None) -> Submitted:
    """Store a document and submit its task, in the caller's transaction.

    The same content under the same name meets the same task, whatever became of it; only one that was discarded, and
    that nobody wanted any more, is begun anew.
    """
    _check(name, content)
    connection = connection_of(session)
    values = {
        "name": name,
        "media_type": media_type_of(name, media_type),
        "sha256": hashlib.sha256(content).digest(),
        "content": content,
        "size_bytes": len(content),
    }
    put = connection.execute(PUT, values).first()
    id_, revision = put or connection.execute(CURRENT_OF_NAME, {"name": name}).one()
    submitted = _submit(session, id_, revision)
    if submitted.status is TaskStatus.DISCARDED:
        submitted = _submit(session, id_, connection.execute(ONCE_MORE, {"id": id_}).scalar_one())
    return submitted


def read(connection: Db, document_id: uuid.UUID, revision: int) -> Stored | None:
    """None: it is gone, or another revision is current."""
    row = connection_of(connection).execute(READ, {"id": document_id, "revision": revision}).first()
    return Stored(row.name, row.media_type, bytes(row.content)) if row else None


def is_current(connection: Db, document_id: uuid.UUID, revision: int) -> bool:
    return bool(connection_of(connection).execute(IS_CURRENT, {"id": document_id, "revision": revision}).scalar_one())


def deaths(connection: Db, task_ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, str]:
    """Which of the tasks are DEAD, and of what."""
    return {id_: said or "" for id_, said in connection_of(connection).execute(DEATHS, {"ids": list(task_ids)})}


def replace_chunks(db: Db, document_id: uuid.UUID, revision: int, pieces: Sequence[Chunk]) -> None:
    """In the transaction that also says SUCCEEDED. An old revision writes nothing: `Discard`."""
    connection = connection_of(db)
    if not connection.execute(HOLD, {"id": document_id, "revision": revision}).first():
        raise Superseded
    connection.execute(FORGET_CHUNKS, {"id": document_id})
    connection.execute(ADD_CHUNKS, {"id": document_id, "texts": [piece.text for piece in pieces]})


class Superseded(Discard):
    """Not needed any more."""

    def __init__(self) -> None:
        super().__init__("A newer upload has replaced this one, or the document was deleted.")


def _check(name: str, content: bytes) -> None:
    most = settings.current().document_max_bytes
    if len(content) > most:
        raise DocumentTooLarge(f"The document has {len(content):,} bytes, and {most:,} is the most.")
    if not name.strip():
        raise BadDocumentName
    if name != storable(name):
        raise BadDocumentName("The name of the document has a NUL character or half of a surrogate pair.")
    if len(name.encode()) > LONGEST_NAME:
        raise BadDocumentName(f"The name of the document has more than {LONGEST_NAME:,} bytes.")


def _submit(session: Db, document_id: uuid.UUID, revision: int) -> Submitted:
    payload = {"documentId": str(document_id), "revision": revision}
    return submit(session, TYPE, payload, key=f"{document_id} {revision}")
