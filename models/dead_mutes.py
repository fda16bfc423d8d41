"""Groups of dead tasks that an operator has muted: a note for people, which changes nothing for the tasks."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Mapped, mapped_column

from models.base import Actor, Base, Flag, Stamp, checks


class DeadMute(Base):
    """The dead tasks of one type and error fingerprint are muted, until `expires_at` if it has a value.

    With `until_next_death`, the mute ends when a task of the group has died after it.
    """

    __table_args__ = checks(one_end="NOT (until_next_death AND expires_at IS NOT NULL)")

    type: Mapped[str] = mapped_column(primary_key=True)
    error_fingerprint: Mapped[str] = mapped_column(primary_key=True)  # empty: the tasks that died without an error
    reason: Mapped[str]
    actor: Mapped[Actor]
    until_next_death: Mapped[Flag]
    expires_at: Mapped[datetime | None]
    created_at: Mapped[Stamp]
