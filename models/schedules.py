"""Schedules: what workers have declared, and how far each has come."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import Index, text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Base, Flag, JsonObject, Stamp, checks, one_of


class CatchUp(StrEnum):
    """What becomes of periods that were missed, because nothing ran or no worker had the handler."""

    ONCE = "once"  # the latest of them runs
    ALL = "all"  # each of them runs
    NONE = "none"  # none of them runs


class Schedule(Base):
    """A schedule of a handler. `next_at` only moves forward, so that no period is submitted twice."""

    __table_args__ = (
        *checks(
            catch_up=one_of("catch_up", CatchUp),
            moves_forward="next_at > last_at",
            paused_by_an_operator="paused = (paused_at IS NOT NULL) AND paused = (paused_by IS NOT NULL)",
        ),
        # The tick reads the schedules that are due.
        Index("ix_schedule_due", "next_at", postgresql_where=text("NOT paused")),
    )

    name: Mapped[str] = mapped_column(primary_key=True)  # the type of its handler
    type: Mapped[str]
    rule: Mapped[str]  # a cron expression, or `every 300s`
    timezone: Mapped[str]
    catch_up: Mapped[str]
    payload: Mapped[JsonObject]  # of each occurrence, together with `scheduledFor`
    next_at: Mapped[datetime | None]  # NULL: the worker that started last has the handler without a schedule
    last_at: Mapped[datetime | None]  # the period that was submitted last
    paused: Mapped[Flag]
    paused_by: Mapped[str | None]
    paused_reason: Mapped[str | None]
    paused_at: Mapped[datetime | None]
    error: Mapped[str | None]  # why its last occurrence could not be submitted
    declared_at: Mapped[Stamp]  # when the worker started that has declared it; an older one changes nothing
