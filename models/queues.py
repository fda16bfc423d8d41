"""What an operator has set for a queue: a pause or a limit."""

from __future__ import annotations

from sqlalchemy.orm import Mapped, mapped_column

from models.base import Actor, Base, Stamp, checks


class QueuePause(Base):
    """A paused queue. It is paused as long as the row exists."""

    queue: Mapped[str] = mapped_column(primary_key=True)
    reason: Mapped[str | None]
    actor: Mapped[Actor]
    created_at: Mapped[Stamp]


class QueueLimit(Base):
    """How many tasks of a queue may run at the same time. Without a row there is no limit."""

    __table_args__ = checks(max_running="max_running >= 0")

    queue: Mapped[str] = mapped_column(primary_key=True)
    max_running: Mapped[int]
