"""The tables of documents and chunks. The row of a document says which revision is current.

    upload           new document: revision 1; changed: the next revision; unchanged: nothing. One task per revision.
    replace_chunks   replace the chunks of a document, if the revision is still current
    delete           delete documents with their chunks

An upload or a deletion waits for another one of the same name and for a `replace_chunks` that has begun, so the last
transaction to commit wins.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import settings
from documents.chunks import Chunk
from documents.decoding import NOT_STORABLE
from documents.file_types import normalize_media_type
from models.errors import CeleriacError, Misuse
from models.sql import sql
from models.status import TaskStatus
from outbox.lease import Db, connection_of
from tasks import Discard, Submitted, submit

TYPE: Final = "document.ingest"
MAX_NAME_BYTES: Final = 1000  # an index holds it

# put: → revision 1, or the next one. Returns no row if nothing has changed; the document is locked all the same.
PUT: Final = sql("""
    INSERT INTO ledger.document (principal, name, media_type, sha256, content, size_bytes, created_at, updated_at)
    SELECT :principal, :name, :media_type, :sha256, :content, :size_bytes, at, at
    FROM (SELECT ledger.ledger_now() AS at) AS clock
    ON CONFLICT (principal, name) DO UPDATE
    SET media_type = excluded.media_type, sha256 = excluded.sha256, content = excluded.content,
        size_bytes = excluded.size_bytes, updated_at = excluded.updated_at, revision = document.revision + 1
    WHERE (document.sha256, document.media_type) IS DISTINCT FROM (excluded.sha256, excluded.media_type)
    RETURNING id, revision
""")
FIND: Final = sql("SELECT id, revision FROM ledger.document WHERE principal = :principal AND name = :name")

# bump_revision: → the next revision, with the same content.
BUMP_REVISION: Final = sql("""
    UPDATE ledger.document SET revision = revision + 1, updated_at = (SELECT ledger.ledger_now())
    WHERE id = :id RETURNING revision
""")

READ: Final = sql("""
    SELECT principal, name, media_type, content FROM ledger.document WHERE id = :id AND revision = :revision
""")
IS_CURRENT: Final = sql("SELECT count(*) FROM ledger.document WHERE id = :id AND revision = :revision")

# hold: no upload or deletion changes the document before this transaction ends. Returns no row if one already has.
HOLD: Final = sql("SELECT 1 FROM ledger.document WHERE id = :id AND revision = :revision FOR SHARE")
DELETE_CHUNKS: Final = sql("DELETE FROM ledger.document_chunk WHERE document_id = :id")
ADD_CHUNKS: Final = sql("""
    INSERT INTO ledger.document_chunk (document_id, position, text)
    SELECT :id, place - 1, text FROM unnest(CAST(:texts AS text[])) WITH ORDINALITY AS given(text, place)
""")

# The documents that match a condition, with the task of the current revision, which its idempotency key determines.
_LISTED: Final = """
    SELECT page.id, name, revision, size_bytes, media_type, chunks, task.status, page.updated_at,
           nullif(principal, '')
    FROM (SELECT id, principal, name, revision, size_bytes, media_type, updated_at FROM ledger.document
          WHERE {condition} AND (CAST(:visible_to AS text) IS NULL OR principal IN ('', :visible_to))
          ORDER BY updated_at DESC, id DESC LIMIT :limit) AS page
    CROSS JOIN LATERAL (SELECT count(*) AS chunks FROM ledger.document_chunk WHERE document_id = page.id) AS counted
    LEFT JOIN ledger.ingest_task AS task ON task.id = ledger.ingest_task_id(:type, page.id || ' ' || revision)
    ORDER BY page.updated_at DESC, page.id DESC
"""
# list: newest change first.
LIST: Final = sql(_LISTED.format(condition="(updated_at, id) < (:before_at, :before_id)"))
FIND_LISTED: Final = sql(_LISTED.format(condition="id = :id"))
# chunks: the text of a document, from a position on.
CHUNKS: Final = sql("""
    SELECT position, text FROM ledger.document_chunk WHERE document_id = :id AND position >= :first
    ORDER BY position LIMIT :limit
""")

# lock: in the order of the names, so that two deletions cannot deadlock.
LOCK: Final = sql("""
    SELECT id, name FROM ledger.document WHERE principal = :principal AND name = ANY(CAST(:names AS text[]))
    ORDER BY name FOR UPDATE
""")
DELETE: Final = sql("DELETE FROM ledger.document WHERE id = ANY(CAST(:ids AS uuid[]))")  # its chunks go with it

FIND_DEAD: Final = sql("""
    SELECT id, error_message FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[])) AND status = 'DEAD'
""")


class DocumentTooLarge(Misuse):
    """The document is too large.

    The file is larger than DOCUMENT_MAX_BYTES.
    """

    code = "document_too_large"
    remedy = "Raise DOCUMENT_MAX_BYTES, or split the document."
    http_status = 413


class BadDocumentName(Misuse):
    """The document's name cannot be stored.

    The name is empty or too long, or contains a NUL character or half of a surrogate pair.
    """

    code = "bad_document_name"
    remedy = "Rename the file."


class UnknownDocument(CeleriacError):
    """There is no such document.

    No document has this name or id.
    """

    code = "unknown_document"
    remedy = "Look up the name with `manage.py documents list`, or over HTTP with `GET /api/knowledge/documents`."
    http_status = 404


@dataclass(frozen=True, slots=True)
class Stored:
    """A document as it was uploaded."""

    principal: str
    name: str
    media_type: str
    content: bytes


@dataclass(frozen=True, slots=True)
class ListedDocument:
    """A document without its content."""

    document_id: uuid.UUID
    name: str
    revision: int
    size_bytes: int
    media_type: str
    chunks: int  # 0 until a first task has succeeded
    status: TaskStatus | None  # of the task of this revision; None: the task was pruned
    updated_at: datetime
    principal: str | None  # None: shared


def upload(session: Db, *, name: str, content: bytes, media_type: str | None = None, principal: str = "") -> Submitted:
    """Store a document and submit its task, in the caller's transaction.

    The same content under the same name returns the existing task, whatever its status. Only if that task was discarded
    is a new one submitted. Documents of different principals may have the same name.
    """
    check_upload(name, content)
    connection = connection_of(session)
    values = {
        "principal": principal,
        "name": name,
        "media_type": normalize_media_type(name, media_type),
        "sha256": hashlib.sha256(content).digest(),
        "content": content,
        "size_bytes": len(content),
    }
    put = connection.execute(PUT, values).first()
    id_, revision = put or connection.execute(FIND, {"principal": principal, "name": name}).one()
    submitted = _submit(session, id_, revision, principal)
    if submitted.status is TaskStatus.DISCARDED:
        next_revision = connection.execute(BUMP_REVISION, {"id": id_}).scalar_one()
        submitted = _submit(session, id_, next_revision, principal)
    return submitted


def read(connection: Db, document_id: uuid.UUID, revision: int) -> Stored | None:
    """Return None if the document was deleted or another revision is current."""
    row = connection_of(connection).execute(READ, {"id": document_id, "revision": revision}).first()
    return Stored(row.principal, row.name, row.media_type, bytes(row.content)) if row else None


def is_current(connection: Db, document_id: uuid.UUID, revision: int) -> bool:
    return bool(connection_of(connection).execute(IS_CURRENT, {"id": document_id, "revision": revision}).scalar_one())


def find_dead(connection: Db, task_ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, str]:
    """Return the error messages of those tasks that are DEAD."""
    rows = connection_of(connection).execute(FIND_DEAD, {"ids": list(task_ids)})
    return {id_: message or "" for id_, message in rows}


def replace_chunks(db: Db, document_id: uuid.UUID, revision: int, chunks: Sequence[Chunk]) -> None:
    """Replace the chunks in the transaction that also writes SUCCEEDED, or raise `Superseded`."""
    connection = connection_of(db)
    if not connection.execute(HOLD, {"id": document_id, "revision": revision}).first():
        raise Superseded
    connection.execute(DELETE_CHUNKS, {"id": document_id})
    connection.execute(ADD_CHUNKS, {"id": document_id, "texts": [chunk.text for chunk in chunks]})


def list_documents(
    connection: Db,
    *,
    before: tuple[datetime, uuid.UUID] | None = None,
    limit: int = 50,
    visible_to: str | None = None,
) -> list[ListedDocument]:
    """Return documents, newest change first. `before` is `updated_at` and id of the last one on the previous page."""
    before_at, before_id = before or ("infinity", uuid.UUID(int=0))
    values = {"type": TYPE, "before_at": before_at, "before_id": before_id, "limit": limit, "visible_to": visible_to}
    return [ListedDocument(*row) for row in connection_of(connection).execute(LIST, values)]


def find_document(connection: Db, document_id: uuid.UUID, *, visible_to: str | None = None) -> ListedDocument:
    """Return one document without its content, or raise `UnknownDocument`."""
    values = {"type": TYPE, "id": document_id, "limit": 1, "visible_to": visible_to}
    row = connection_of(connection).execute(FIND_LISTED, values).first()
    if row is None:
        raise UnknownDocument
    return ListedDocument(*row)


def read_chunks(connection: Db, document_id: uuid.UUID, *, first: int, limit: int) -> list[tuple[int, str]]:
    """Return chunks of a document with their positions, from the position `first` on."""
    values = {"id": document_id, "first": first, "limit": limit}
    return [(position, text) for position, text in connection_of(connection).execute(CHUNKS, values)]


def task_key(document_id: uuid.UUID, revision: int) -> str:
    """Return the idempotency key of the task that makes a revision searchable."""
    return f"{document_id} {revision}"


def lock_documents(connection: Db, names: Collection[str], *, principal: str = "") -> dict[uuid.UUID, str]:
    """Lock documents and return their names by id, or raise `UnknownDocument` with the names that do not exist."""
    possible = [name for name in names if not NOT_STORABLE.search(name)]
    rows = connection_of(connection).execute(LOCK, {"names": possible, "principal": principal})
    found = {id_: name for id_, name in rows}  # noqa: C416
    if missing := sorted(set(names) - set(found.values())):
        shown = ", ".join(repr(name[:100]) for name in missing[:10])
        raise UnknownDocument(f"There is no document named {shown}. Nothing was deleted.")
    return found


def delete(connection: Db, names: Collection[str], *, principal: str = "") -> dict[uuid.UUID, str]:
    """Delete documents with their chunks. Returns the names by id."""
    found = lock_documents(connection, names, principal=principal)
    connection_of(connection).execute(DELETE, {"ids": list(found)})
    return found


class Superseded(Discard):
    """The task is no longer needed."""

    def __init__(self) -> None:
        super().__init__("A newer upload has replaced this one, or the document was deleted.")


def check_upload(name: str, content: bytes) -> None:
    limit = settings.current().document_max_bytes
    if len(content) > limit:
        raise DocumentTooLarge(f"The document has {len(content):,} bytes; the limit is {limit:,} (DOCUMENT_MAX_BYTES).")
    if not name.strip():
        raise BadDocumentName("The document needs a name.")
    if NOT_STORABLE.search(name):
        raise BadDocumentName("The name of the document contains a NUL character or half of a surrogate pair.")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise BadDocumentName(f"The name of the document has more than {MAX_NAME_BYTES:,} bytes.")


def _submit(session: Db, document_id: uuid.UUID, revision: int, principal: str) -> Submitted:
    payload = {"documentId": str(document_id), "revision": revision}
    context = {"principal": principal} if principal else {}
    return submit(session, TYPE, payload, key=task_key(document_id, revision), context=context)
