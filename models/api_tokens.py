"""Tokens of the HTTP API."""

from __future__ import annotations

import uuid
from datetime import datetime

from sqlalchemy import CheckConstraint, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Base, Stamp


class ApiToken(Base):
    """A token of the API. Only its hash is stored."""

    __tablename__ = "api_token"
    __table_args__ = (
        UniqueConstraint("name"),
        UniqueConstraint("token_sha256"),
        CheckConstraint("octet_length(token_sha256) = 32", name="token_sha256"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    name: Mapped[str]
    token_sha256: Mapped[bytes]
    scopes: Mapped[list[str]] = mapped_column(server_default=text("'{}'"))
    created_at: Mapped[Stamp]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
