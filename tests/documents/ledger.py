"""Documents as tests hold them: uploaded, ingested piece by piece, and what the ledger says of them."""

from __future__ import annotations

import uuid
from typing import Any

import documents
from documents import store
from documents.chunks import chunks
from models.engine import engine, sessions
from models.sql import sql
from tasks.submission.submit import Submitted


def uploaded(content: str | bytes, name: str = "a.txt", media_type: str | None = None) -> Submitted:
    raw = content.encode() if isinstance(content, str) else content
    with sessions().begin() as session:
        return documents.upload(session, name=name, content=raw, media_type=media_type)


def searchable(content: str, name: str = "a.txt") -> uuid.UUID:
    """Uploaded and cut, without its task; returns the document."""
    uploaded(content, name)
    id_, revision = document(name)["id"], document(name)["revision"]
    with sessions().begin() as session:
        store.replace_chunks(session, id_, revision, chunks(content))
    return uuid.UUID(str(id_))


def document(name: str = "a.txt") -> dict[str, Any]:
    with engine().connect() as connection:
        found = connection.execute(sql("SELECT * FROM ledger.document WHERE name = :name"), {"name": name})
        return dict(found.mappings().one())


def chunk_texts(name: str = "a.txt") -> list[str]:
    statement = sql("""
        SELECT text FROM ledger.document_chunk JOIN ledger.document ON id = document_id WHERE name = :name ORDER BY position""")
    with engine().connect() as connection:
        return list(connection.execute(statement, {"name": name}).scalars())


def found(words: str, **how: Any) -> list[documents.Hit]:
    with engine().connect() as connection:
        return documents.search(connection, words, **how)


def names(words: str, **how: Any) -> list[str]:
    return [hit.name for hit in found(words, **how)]
