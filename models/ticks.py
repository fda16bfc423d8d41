"""Ticks: when each last ran, in which process, and how it ended."""

from __future__ import annotations

import uuid
from datetime import datetime

from sqlalchemy.orm import Mapped, mapped_column

from models.base import LEASE, Base, checks


class Tick(Base):
    """The lease of a tick, which one process at a time may run. `holder` and `error` describe the last run."""

    __table_args__ = checks(lease=LEASE)

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str | None]
    lease_token: Mapped[uuid.UUID | None]
    lease_until: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    error: Mapped[str | None]  # NULL if it succeeded
