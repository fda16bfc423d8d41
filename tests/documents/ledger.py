"""Upload, index, read and search documents in the ledger of the tests."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import documents
from documents import store
from documents.chunks import split
from models.engine import engine, sessions
from models.sql import sql
from tasks import Submitted
from tests.tasks.deliveries import delivered


def upload(content: str | bytes, name: str = "a.txt", media_type: str | None = None, principal: str = "") -> Submitted:
    raw = content.encode() if isinstance(content, str) else content
    with sessions().begin() as session:
        return documents.upload(session, name=name, content=raw, media_type=media_type, principal=principal)


def add_searchable(content: str, name: str = "a.txt") -> uuid.UUID:
    """Upload a document, write its chunks without running its task, and return its id."""
    upload(content, name)
    document = read_document(name)
    with sessions().begin() as session:
        store.replace_chunks(session, document["id"], document["revision"], split(content))
    return uuid.UUID(str(document["id"]))


def run_tasks(ids: Sequence[uuid.UUID]) -> None:
    """Deliver tasks until all have run. A worker releases the rest of a batch if its tasks are new to it or slow."""
    for _ in ids:
        delivered(ids)


def read_document(name: str = "a.txt") -> dict[str, Any]:
    with engine().connect() as connection:
        found = connection.execute(sql("SELECT * FROM ledger.document WHERE name = :name"), {"name": name})
        return dict(found.mappings().one())


def read_chunks(name: str = "a.txt") -> list[str]:
    statement = sql("""
        SELECT text FROM ledger.document_chunk JOIN ledger.document ON id = document_id
        WHERE name = :name ORDER BY position""")
    with engine().connect() as connection:
        return list(connection.execute(statement, {"name": name}).scalars())


def search(words: str, **options: Any) -> list[documents.Hit]:
    with engine().connect() as connection:
        return documents.search(connection, words, **options)


def search_names(words: str, **options: Any) -> list[str]:
    return [hit.name for hit in search(words, **options)]
