"""document.ingest: make an uploaded document searchable. Its payload is {"documentId", "revision"}.

Reading the file and copying its chunks to Chroma happen outside any transaction. The chunks and SUCCEEDED commit
together. A file that cannot be read makes the task DEAD at once; an unreachable Chroma is retried; the task of a
deleted document, or of an upload that a newer one has replaced, ends DISCARDED, in whatever order the tasks run.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import settings
from documents import store
from documents.chroma import Chroma
from documents.chunks import Chunk, split
from documents.extract import extract
from documents.unreadable import Unreadable
from models.engine import engine
from tasks import Finish, Permanent, Snooze, Task, handler


@handler(store.TYPE, transactional=False, batch=20, soft_limit_seconds=600)
def ingest_document(task: Task) -> Finish:
    document_id, revision = _parse(task.payload)
    with engine().connect() as connection:
        stored = store.read(connection, document_id, revision)
    if stored is None:
        _delete_copy(document_id, revision)  # an earlier attempt may have been killed after it had copied the chunks
        raise store.Superseded
    if task.context.get("principal", stored.principal) != stored.principal:
        raise store.Superseded  # a task that was submitted over HTTP cannot reach a document of another principal
    options = settings.current()
    try:
        extracted = extract(
            stored.content,
            name=stored.name,
            media_type=stored.media_type,
            max_characters=options.document_max_bytes,
            max_pages=options.document_max_pages,
            cpu_seconds=options.document_max_seconds,
        )
    except Unreadable as error:
        raise Permanent(f"{error} ({stored.name})") from None
    chunks = split(extracted.text)
    _copy_to_chroma(document_id, revision, stored.name, chunks)
    result = {"documentId": str(document_id), "chunks": len(chunks), "characters": len(extracted.text)}
    if extracted.pages is not None:
        result["pages"] = extracted.pages
    return Finish(partial(_write, document_id, revision, chunks), result)


def _parse(payload: Any) -> tuple[uuid.UUID, int]:
    try:
        return uuid.UUID(payload["documentId"]), int(payload["revision"])
    except (TypeError, KeyError, ValueError, AttributeError):
        raise Permanent('The payload must be {"documentId": …, "revision": …}, as an upload writes it.') from None


def _write(document_id: uuid.UUID, revision: int, chunks: Sequence[Chunk], db: Any) -> None:
    """Replace the chunks in the transaction that also writes SUCCEEDED."""
    try:
        store.replace_chunks(db, document_id, revision, chunks)
    except store.Superseded:
        if settings.current().chroma_base_url:
            raise Snooze(0) from None  # the next run deletes the copy in Chroma, outside this transaction
        raise


def _copy_to_chroma(document_id: uuid.UUID, revision: int, name: str, chunks: Sequence[Chunk]) -> None:
    """Copy the chunks, and delete the copy again if a newer upload was committed meanwhile."""
    url = settings.current().chroma_base_url
    if not url:
        return
    with Chroma(url) as chroma:
        chroma.put(document_id, revision, name, chunks)
        with engine().connect() as connection:
            is_current = store.is_current(connection, document_id, revision)
        if not is_current:
            chroma.delete_revision(document_id, revision)
            raise store.Superseded


def _delete_copy(document_id: uuid.UUID, revision: int) -> None:
    if url := settings.current().chroma_base_url:
        with Chroma(url) as chroma:
            chroma.delete_revision(document_id, revision)
