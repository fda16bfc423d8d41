"""Delete documents: their rows, their chunks and their copies in Chroma."""

from __future__ import annotations

from collections.abc import Collection

import settings
from documents import store
from outbox.lease import Db


def delete(session: Db, names: Collection[str], *, principal: str = "") -> list[str]:
    """Delete documents in the caller's transaction and return their names, or raise `UnknownDocument`.

    The copies in Chroma are deleted at once, not at the commit. If Chroma fails, the exception makes the caller roll
    back, so the deletion can be repeated. An ingest task of a deleted document ends DISCARDED and removes its own copy.
    """
    deleted = store.delete(session, names, principal=principal)
    url = settings.current().chroma_base_url
    if url and deleted:
        from documents.chroma import Chroma  # noqa: PLC0415 - loads httpx2

        with Chroma(url) as chroma:
            for document_id in deleted:
                chroma.delete_document(document_id)
    return list(deleted.values())
