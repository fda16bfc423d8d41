"""Chats of two users. The id of a message is the id of its task and its serverMsgId."""

from __future__ import annotations

import uuid
from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Base, RandomId, Stamp, checks


class Chat(Base):
    """The only chat of two users. They are stored in order, so that both find the same row even if they race."""

    __table_args__ = (
        UniqueConstraint("first_user_id", "second_user_id"),
        # Code point order as in Python's `sorted`, whatever the collation of the database is.
        *checks(user_order='first_user_id COLLATE "C" <= second_user_id COLLATE "C"'),
    )

    id: Mapped[RandomId]
    first_user_id: Mapped[str]
    second_user_id: Mapped[str]
    created_at: Mapped[Stamp]


class ChatMember(Base):
    """A user in a chat, and how far the user has read."""

    chat_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("ledger.chat.id", ondelete="CASCADE"), primary_key=True)
    user_id: Mapped[str] = mapped_column(primary_key=True, index=True)  # the index lists the chats of one user
    read_until_at: Mapped[datetime | None]
    created_at: Mapped[Stamp]


class ChatMessage(Base):
    """A saved message. `sent_at` comes from the sender's clock: it is shown and decides nothing."""

    __table_args__ = (
        # A client that repeats a message after a lost receipt gets the same row.
        UniqueConstraint("from_user_id", "client_msg_id"),
        # Reads the history of a chat, page by page.
        Index("ix_chat_message_history", "chat_id", "accepted_at", "id"),
        # Read what a user may have missed, as sender or as receiver (`receipts/chat_history.py`).
        Index("ix_chat_message_to", "to_user_id", "transaction_id"),
        Index("ix_chat_message_from", "from_user_id", "transaction_id"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    chat_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("ledger.chat.id", ondelete="CASCADE"))
    client_msg_id: Mapped[str]
    from_user_id: Mapped[str]
    to_user_id: Mapped[str]
    msg_type: Mapped[str] = mapped_column(server_default="text")
    body: Mapped[str]
    producer_server_id: Mapped[str | None]
    sent_at: Mapped[datetime | None]
    accepted_at: Mapped[Stamp]
    saved_at: Mapped[Stamp]
    # Of PostgreSQL. Ids of rows do not follow the order of commits; the oldest running transaction tells which do.
    transaction_id: Mapped[int] = mapped_column(
        BigInteger, server_default=text("CAST(CAST(pg_current_xact_id() AS text) AS bigint)")
    )
