"""document.ingest: an uploaded document becomes searchable. Its payload is {"documentId", "revision"}.

Reading the file and telling Chroma happen outside any transaction; the chunks and SUCCEEDED commit together. A file
that cannot be read is DEAD at once, with a sentence; a Chroma that does not answer is tried again; an upload that a
newer one has replaced is DISCARDED, whichever of the two tasks runs first.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import settings
from documents import store
from documents.chroma import Chroma
from documents.chunks import Chunk, chunks
from documents.extract import extract
from documents.unreadable import Unreadable
from models.engine import engine
from tasks.core.outcomes import Finish, Permanent
from tasks.core.registry import handler
from tasks.core.task import Task


@handler(store.TYPE, transactional=False, batch=20, soft_limit_seconds=600)
def ingest_document(task: Task) -> Finish:
    document_id, revision = _asked(task.payload)
    with engine().connect() as connection:
        stored = store.read(connection, document_id, revision)
    if stored is None:
        _forget_in_chroma(document_id, revision)
        raise store.Superseded
    knobs = settings.current()
    try:
        found = extract(
            stored.content,
            name=stored.name,
            media_type=stored.media_type,
            most=knobs.document_max_bytes,
            most_pages=knobs.document_max_pages,
            cpu_seconds=knobs.document_max_seconds,
        )
    except Unreadable as refused:
        raise Permanent(f"{refused} ({stored.name})") from None
    pieces = chunks(found.text)
    _copy_to_chroma(document_id, revision, stored.name, pieces)
    result = {"documentId": str(document_id), "chunks": len(pieces), "characters": len(found.text)}
    if found.pages is not None:
        result["pages"] = found.pages
    return Finish(partial(_write, document_id, revision, pieces), result)


def _asked(payload: Any) -> tuple[uuid.UUID, int]:
    try:
        return uuid.UUID(payload["documentId"]), int(payload["revision"])
    except (TypeError, KeyError, ValueError, AttributeError):
        raise Permanent('The payload is {"documentId": …, "revision": …}, as an upload writes it.') from None


def _write(document_id: uuid.UUID, revision: int, pieces: Sequence[Chunk], db: Any) -> None:
    store.replace_chunks(db, document_id, revision, pieces)


def _copy_to_chroma(document_id: uuid.UUID, revision: int, name: str, pieces: Sequence[Chunk]) -> None:
    """A newer revision removes older ones when it comes; if it came meanwhile, this one removes itself."""
    url = settings.current().chroma_base_url
    if not url:
        return
    with Chroma(url) as chroma:
        chroma.put(document_id, revision, name, pieces)
        with engine().connect() as connection:
            is_current = store.is_current(connection, document_id, revision)
        if not is_current:
            chroma.forget(document_id, revision)
            raise store.Superseded


def _forget_in_chroma(document_id: uuid.UUID, revision: int) -> None:
    """An attempt before may have been killed after it had told Chroma."""
    if url := settings.current().chroma_base_url:
        with Chroma(url) as chroma:
            chroma.forget(document_id, revision)
