"""Consumers of streams: their checkpoints, and the leases on shards."""

from __future__ import annotations

import uuid
from datetime import datetime

from sqlalchemy import Index
from sqlalchemy.orm import Mapped, mapped_column

from models.base import LEASE, Base, Count, Flag, JsonObject, Number, Stamp, checks


class Checkpoint(Base):
    """Offsets and state from which the consumer of a stream can start again. They belong together."""

    __table_args__ = (
        *checks(shard="shard >= 0"),
        # Reads the newest checkpoint of a shard.
        Index("ix_checkpoint_newest", "stream", "shard", "id"),
    )

    id: Mapped[Number]
    stream: Mapped[str]
    shard: Mapped[Count]
    offsets: Mapped[JsonObject]
    state: Mapped[JsonObject]
    sink_committed: Mapped[Flag]
    created_at: Mapped[Stamp]
    completed_at: Mapped[datetime | None]


class ShardLease(Base):
    """The right to consume one shard of a stream."""

    __table_args__ = checks(shard="shard >= 0", lease=LEASE)

    stream: Mapped[str] = mapped_column(primary_key=True)
    shard: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    holder: Mapped[str | None]
    lease_token: Mapped[uuid.UUID | None]
    lease_until: Mapped[datetime | None]
