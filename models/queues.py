"""What an operator has decided about a queue: paused, or limited."""

from __future__ import annotations

from sqlalchemy import CheckConstraint
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Actor, Base, Stamp


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
