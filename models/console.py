"""Who is logged in to the console: sessions of browsers, and links that log in once. Only hashes are stored.

Both belong to an API token, by its hash: a token that was revoked and created again under its old name is another one.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Mapped, mapped_column

from models.base import Base, Stamp, checks


class ConsoleSession(Base):
    """A browser that is logged in. It may do what its token may do, as long as the token is valid."""

    __table_args__ = checks(session_sha256="octet_length(session_sha256) = 32")

    session_sha256: Mapped[bytes] = mapped_column(primary_key=True)
    token_sha256: Mapped[bytes]
    created_at: Mapped[Stamp]
    expires_at: Mapped[datetime]


class ConsoleLink(Base):
    """A link that logs in once. The row is deleted when it is used."""

    __table_args__ = checks(code_sha256="octet_length(code_sha256) = 32")

    code_sha256: Mapped[bytes] = mapped_column(primary_key=True)
    token_sha256: Mapped[bytes]
    created_at: Mapped[Stamp]
    expires_at: Mapped[datetime]
