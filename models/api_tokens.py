"""Tokens of the HTTP API."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Base, RandomId, Stamp, checks


class ApiToken(Base):
    """A token of the API. Only its hash is stored."""

    __table_args__ = checks(token_sha256="octet_length(token_sha256) = 32")  # noqa: S106 - the name of a CHECK

    id: Mapped[RandomId]
    name: Mapped[str] = mapped_column(unique=True)
    token_sha256: Mapped[bytes] = mapped_column(unique=True)
    scopes: Mapped[list[str]] = mapped_column(server_default=text("'{}'"))
    types: Mapped[list[str]] = mapped_column(server_default=text("'{}'"))  # patterns; empty: any
    created_at: Mapped[Stamp]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
