"""What holds the running system together and steers it: checkpoints, shard leases, ticks, pauses, limits, tokens."""

from __future__ import annotations

import uuid
from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, Identity, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Actor, Base, JsonObject, Stamp, lease_check


class Checkpoint(Base):
    """A point from which a stream's consumer can start again: its offsets and its state belong together."""

    __tablename__ = "checkpoint"
    __table_args__ = (
        CheckConstraint("shard >= 0", name="shard"),
        # Restoring reads the newest of one shard.
        Index("ix_checkpoint_newest", "stream", "shard", "id"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    stream: Mapped[str]
    shard: Mapped[int] = mapped_column(server_default=text("0"))
    offsets: Mapped[JsonObject]
    state: Mapped[JsonObject]
    sink_committed: Mapped[bool] = mapped_column(server_default=text("false"))
    created_at: Mapped[Stamp]
    completed_at: Mapped[datetime | None]


class ShardLease(Base):
    """Who alone may consume this shard of this stream."""

    __tablename__ = "shard_lease"
    __table_args__ = (CheckConstraint("shard >= 0", name="shard"), lease_check())

    stream: Mapped[str] = mapped_column(primary_key=True)
    shard: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    holder: Mapped[str | None]
    lease_token: Mapped[uuid.UUID | None]
    lease_until: Mapped[datetime | None]


class Tick(Base):
    """The single flight of a tick (P24). `holder` and `error` outlive the lease: who ran last, and how that ended."""

    __tablename__ = "tick"
    __table_args__ = (lease_check(),)

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str | None]
    lease_token: Mapped[uuid.UUID | None]
    lease_until: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    error: Mapped[str | None]  # None: it ended well


class QueuePause(Base):
    """A queue that an operator stopped. The row is the pause."""

    __tablename__ = "queue_pause"

    queue: Mapped[str] = mapped_column(primary_key=True)
    reason: Mapped[str | None]
    actor: Mapped[Actor]
    created_at: Mapped[Stamp]


class QueueLimit(Base):
    """How many tasks of a queue may run at once. No row: as many as there are workers."""

    __tablename__ = "queue_limit"
    __table_args__ = (CheckConstraint("max_running >= 0", name="max_running"),)

    queue: Mapped[str] = mapped_column(primary_key=True)
    max_running: Mapped[int]


class ApiToken(Base):
    """A key to the API, of which only the hash is kept."""

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
