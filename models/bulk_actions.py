"""Bulk actions: what an operator does to all tasks that match a search, and how far it has come.

A row is the order, its progress and its audit entry at once, and is never deleted. A process claims it with a random
token and adds to `changed` in the transaction that changes the tasks, under that token. So the number is exact, and a
process that has lost the row changes nothing more.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Actor, Base, Flag, Json, RandomId, Stamp, checks, one_of


class BulkVerb(StrEnum):
    """What is done to the tasks: the word in addresses."""

    REQUEUE = "requeue"
    DISCARD = "discard"
    RUN_NOW = "run-now"


class BulkState(StrEnum):
    """The state of a bulk action."""

    WAITING = "waiting"  # for a process that does it
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"  # by an operator, an error or the end of its process; it can be continued
    CANARY_FAILED = "canary failed"  # so the others were left unchanged


class BulkAction(Base):
    """One bulk action."""

    __table_args__ = (
        *checks(
            action=one_of("action", BulkVerb),
            state=one_of("state", BulkState),
            running_is_claimed="(state = 'running') = (token IS NOT NULL)",
            ended_is_finished="(state IN ('done', 'stopped', 'canary failed')) = (finished_at IS NOT NULL)",
            per_second="per_second > 0",
            canary="canary >= 1",
            canary_seconds="(canary IS NULL) = (canary_seconds IS NULL)",
            changed="changed >= 0",
        ),
        # Lists the actions, the latest first.
        Index("ix_bulk_action_created_at", "created_at", "id"),
        # Finds the one that waits longest, every few seconds in each API process.
        Index("ix_bulk_action_waiting", "created_at", "id", postgresql_where=text("state = 'waiting'")),
    )

    id: Mapped[RandomId]
    action: Mapped[str]
    query: Mapped[str]  # as it was searched for
    filter: Mapped[Json]  # what the query meant
    as_of: Mapped[datetime]  # tasks that have changed since then are left as they are
    reason: Mapped[str]
    actor: Mapped[Actor]
    per_second: Mapped[float | None]
    canary: Mapped[int | None]  # so many first; the others only if these succeed
    canary_seconds: Mapped[int | None]
    canary_ids: Mapped[list[uuid.UUID] | None]
    canary_statuses: Mapped[Json | None]  # what became of them
    reset_steps: Mapped[Flag]
    accept_duplicates: Mapped[Flag]  # also tasks whose sinks have forgotten their keys
    state: Mapped[str] = mapped_column(server_default="waiting")
    matched: Mapped[int | None] = mapped_column(BigInteger)  # NULL: not counted yet
    left_out: Mapped[int | None] = mapped_column(BigInteger)  # matched, too, but their sinks have forgotten their keys
    changed: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    sample: Mapped[list[uuid.UUID]] = mapped_column(server_default=text("'{}'"))  # the first tasks that were changed
    message: Mapped[str | None]  # why it ended, or what was left to do
    token: Mapped[uuid.UUID | None]  # of the process that does it
    created_at: Mapped[Stamp]
    started_at: Mapped[datetime | None]
    seen_at: Mapped[datetime | None]  # the last sign of life of that process
    finished_at: Mapped[datetime | None]
