"""Documents and their searchable chunks, which the handler `document.ingest` writes."""

from __future__ import annotations

import uuid

from sqlalchemy import BigInteger, Computed, ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.dialects.postgresql import TSVECTOR
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Base, RandomId, Stamp, checks


class Document(Base):
    """The latest upload of a file under its name. `revision` counts the uploads that changed its content."""

    __table_args__ = (
        *checks(
            sha256="octet_length(sha256) = 32",
            size_bytes="size_bytes = octet_length(content)",
            revision="revision >= 1",
        ),
        # An upload under an existing name replaces the document of the same principal.
        UniqueConstraint("principal", "name"),
    )

    id: Mapped[RandomId]
    principal: Mapped[str] = mapped_column(server_default=text("''"))  # the API token's name; empty: shared
    name: Mapped[str]
    media_type: Mapped[str]
    sha256: Mapped[bytes]
    content: Mapped[bytes]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[Stamp]
    updated_at: Mapped[Stamp]
    revision: Mapped[int] = mapped_column(server_default=text("1"))


class DocumentChunk(Base):
    """A part of a document's text. Words are not stemmed ('simple'), because documents come in any language."""

    __table_args__ = (
        *checks(position="position >= 0"),
        # Used by the search (GET /api/knowledge/search).
        Index("ix_document_chunk_words", "words", postgresql_using="gin"),
    )

    document_id: Mapped[uuid.UUID] = mapped_column(
        ForeignKey("ledger.document.id", ondelete="CASCADE"), primary_key=True
    )
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    text: Mapped[str]
    words: Mapped[str] = mapped_column(
        TSVECTOR, Computed("to_tsvector('simple'::regconfig, text)", persisted=True), nullable=False
    )
