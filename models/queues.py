"""What is set for a queue: pauses and a number of processes by operators, and the alert about its backlog.

A queue has no row here as long as nothing is set for it. The claim and the submit look into these tables each time, so
they must stay small.
"""

from __future__ import annotations

from sqlalchemy.orm import Mapped, mapped_column

from models.base import Actor, Base, Count, Flag, Stamp, checks


class QueuePause(Base):
    """A paused queue. It is paused as long as the row exists.

    A row with `intake` refuses new tasks; one without it lets no task start. A queue may have both.
    """

    queue: Mapped[str] = mapped_column(primary_key=True)
    intake: Mapped[Flag] = mapped_column(primary_key=True)
    reason: Mapped[str | None]
    actor: Mapped[Actor]
    created_at: Mapped[Stamp]


class QueueScale(Base):
    """The target number of processes for each prefork worker that consumes the queue."""

    __table_args__ = checks(processes="processes BETWEEN 1 AND 128")

    queue: Mapped[str] = mapped_column(primary_key=True)
    processes: Mapped[int]
    actor: Mapped[Actor]
    created_at: Mapped[Stamp]


class QueueAlert(Base):
    """Too many tasks wait in the queue. The row exists from the alert until the backlog is small again."""

    __table_args__ = checks(processes="processes BETWEEN 1 AND 128")

    queue: Mapped[str] = mapped_column(primary_key=True)
    waiting: Mapped[Count]  # when it was last counted; counting stops just above the threshold
    refuses: Mapped[Flag]  # new tasks are refused meanwhile
    processes: Mapped[int | None]  # what each worker has meanwhile, if that is more than QueueScale says
    created_at: Mapped[Stamp]
