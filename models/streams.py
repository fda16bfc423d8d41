"""Consumers of streams: their checkpoints, and the leases on shards."""

from __future__ import annotations

import uuid
from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, Identity, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Base, JsonObject, Stamp, lease_check


class Checkpoint(Base):
    """Offsets and state from which the consumer of a stream can start again. They belong together."""

    __tablename__ = "checkpoint"
    __table_args__ = (
        CheckConstraint("shard >= 0", name="shard"),
        # Reads the newest checkpoint of a shard.
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
    """The right to consume one shard of a stream."""

    __tablename__ = "shard_lease"
    __table_args__ = (CheckConstraint("shard >= 0", name="shard"), lease_check())

    stream: Mapped[str] = mapped_column(primary_key=True)
    shard: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    holder: Mapped[str | None]
    lease_token: Mapped[uuid.UUID | None]
    lease_until: Mapped[datetime | None]
