"""The tasks, their history, and the leases on them (P1, P2).

No foreign keys: a queue table that locks the rows of another in every insert is a slow queue table. No index on a
column that only a lease touches: reclaim finds the tasks of a lost lease through `task_lease.task_ids`.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Identity,
    Index,
    PrimaryKeyConstraint,
    Sequence,
    SmallInteger,
    Text,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from models.base import HOT, Actor, Base, Json, JsonObject, Stamp, quoted, status_check
from models.status import TASK_TRANSITIONS, TaskStatus


def _transition_rule() -> str:
    """The pairs of TASK_TRANSITIONS as a CASE. (A chain of ORs would be NULL where from_status is, and NULL passes.)"""
    ways = []
    for source, targets in TASK_TRANSITIONS.items():
        if targets:
            condition = "from_status IS NULL" if source is None else f"from_status = '{source}'"
            ways.append(f"WHEN {condition} THEN to_status IN ({quoted(*sorted(targets))})")
    return f"CASE {' '.join(ways)} ELSE false END"


# As PostgreSQL writes it, line by line: Alembic compares the texts.
_DUE_AT: Final = """(
CASE
WHEN partition_key IS NULL THEN coalesce(next_retry_at, '-infinity')
ELSE 'infinity'
END)"""
KEY_SEQ: Final = Sequence("ingest_task_key_seq", metadata=Base.metadata)


class IngestTask(Base):
    """One promised piece of work. Its id is made by the submitter (P10), so that all lanes agree on it."""

    __tablename__ = "ingest_task"
    __table_args__ = (
        status_check("status", TaskStatus),
        CheckConstraint("(status = 'RUNNING') = (lease_token IS NOT NULL)", name="running_is_leased"),
        CheckConstraint(
            "(status IN ('SUCCEEDED', 'DEAD', 'DISCARDED')) = (finished_at IS NOT NULL)", name="final_is_finished"
        ),
        CheckConstraint(
            "CASE status WHEN 'RETRYING' THEN next_retry_at IS NOT NULL"
            " WHEN 'SUCCEEDED' THEN next_retry_at IS NULL WHEN 'DEAD' THEN next_retry_at IS NULL ELSE true END",
            name="next_retry_at",
        ),
        CheckConstraint("priority BETWEEN 0 AND 9", name="priority"),
        CheckConstraint("attempt_count >= 0", name="attempt_count"),
        CheckConstraint("max_attempts >= 1", name="max_attempts"),
        CheckConstraint("(partition_key IS NULL) = (key_seq IS NULL)", name="partition_key"),
        CheckConstraint("(last_error IS NULL) = (error_message IS NULL)", name="error_together"),
        CheckConstraint("length(last_error) <= 4000", name="last_error"),
        CheckConstraint("length(error_message) <= 500", name="error_message"),
        # The guard's topping up, reclaim and "how long does the oldest wait" range over the due of one queue and
        # type. Tasks that are not due yet lie behind the range, so a million of them cost nothing; so do tasks with a
        # partition key, which wait for each other.
        Index(
            "ix_ingest_task_due",
            "queue",
            "type",
            text(_DUE_AT),
            "id",
            postgresql_where=text("status IN ('QUEUED', 'RETRYING')"),
        ),
        # Who is the first of its partition key, and who comes next (P9). What is done is not in it.
        Index(
            "ix_ingest_task_key",
            "partition_key",
            "key_seq",
            postgresql_where=text("partition_key IS NOT NULL AND status NOT IN ('SUCCEEDED', 'DISCARDED')"),
        ),
        # Dead letters are listed by age, page by page, out of a table that holds millions of finished tasks.
        Index("ix_ingest_task_dead", "finished_at", "id", postgresql_where=text("status = 'DEAD'")),
        # Pruning takes the oldest that are done.
        Index("ix_ingest_task_done", "finished_at", postgresql_where=text("status IN ('SUCCEEDED', 'DISCARDED')")),
        {"postgresql_with": HOT},
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    type: Mapped[str]
    payload: Mapped[Json]
    context: Mapped[JsonObject]
    queue: Mapped[str] = mapped_column(server_default="ingest")
    priority: Mapped[int] = mapped_column(SmallInteger, server_default=text("5"))
    partition_key: Mapped[str | None] = mapped_column(Text(collation="C"))
    key_seq: Mapped[int | None] = mapped_column(BigInteger)  # drawn under a lock of its key: the order of commits
    idempotency_key: Mapped[str | None]
    status: Mapped[TaskStatus] = mapped_column(server_default="QUEUED")
    attempt_count: Mapped[int] = mapped_column(server_default=text("0"))
    max_attempts: Mapped[int] = mapped_column(server_default=text("10"))
    next_retry_at: Mapped[datetime | None]
    last_wakeup_at: Mapped[datetime | None]
    lease_token: Mapped[uuid.UUID | None]
    isolated: Mapped[bool] = mapped_column(server_default=text("false"))
    last_error: Mapped[str | None]
    error_message: Mapped[str | None]
    error_code: Mapped[str | None]
    result: Mapped[Json | None]
    notify: Mapped[str | None]
    created_at: Mapped[Stamp]
    updated_at: Mapped[Stamp]
    finished_at: Mapped[datetime | None]


class IngestTaskTransition(Base):
    """One change of status, written in the transaction that made it."""

    __tablename__ = "ingest_task_transition"
    __table_args__ = (
        CheckConstraint(_transition_rule(), name="way"),
        CheckConstraint("attempt_count >= 0", name="attempt_count"),
        # One index for the history of a task, in its order, and for pruning it: every change of a task writes here.
        PrimaryKeyConstraint("task_id", "id"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True))
    task_id: Mapped[uuid.UUID]
    from_status: Mapped[TaskStatus | None]
    to_status: Mapped[TaskStatus]
    attempt_count: Mapped[int] = mapped_column(server_default=text("0"))
    message: Mapped[str | None]
    actor: Mapped[Actor]
    created_at: Mapped[Stamp]


class TaskLease(Base):
    """The right to run and settle a batch of tasks (P2). Renewal touches this one row; reclaim scans this small table.

    No index on `lease_until`: the table holds one row per running batch, and renewals stay HOT.
    """

    __tablename__ = "task_lease"
    __table_args__ = (CheckConstraint("priority BETWEEN 0 AND 9", name="priority"), {"postgresql_with": HOT})

    token: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    holder: Mapped[str]
    lease_until: Mapped[datetime]
    task_ids: Mapped[list[uuid.UUID]]
    type: Mapped[str]
    queue: Mapped[str]
    priority: Mapped[int] = mapped_column(SmallInteger)
    claimed_at: Mapped[Stamp]
    last_wakeup_at: Mapped[datetime | None]  # of the latest of the tasks that its own message named


class WakeupHorizon(Base):
    """How far the broker has come with the wake-ups of a queue and priority (P8): what was woken before and waits is lost.

    `seen_wakeup_at` was claimed at `seen_at`; once that is a grace ago, it becomes `passed_wakeup_at`.
    """

    __tablename__ = "wakeup_horizon"

    queue: Mapped[str] = mapped_column(primary_key=True)
    priority: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    seen_wakeup_at: Mapped[datetime]
    seen_at: Mapped[datetime]
    passed_wakeup_at: Mapped[datetime | None]


class TaskAudit(Base):
    """What a holder tried and was refused, or did against the rules: `late_success`, a lost lease."""

    __tablename__ = "task_audit"
    # The audit of one task, on its page and when it is pruned.
    __table_args__ = (Index("ix_task_audit_task_id", "task_id"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    task_id: Mapped[uuid.UUID]
    code: Mapped[str]
    worker_id: Mapped[str]
    detail: Mapped[str | None]
    created_at: Mapped[Stamp]


class TaskTombstone(Base):
    """What is left of a pruned task that had a key: whoever submits the key again meets it (P10)."""

    __tablename__ = "task_tombstone"
    # Stones, too, are pruned by age.
    __table_args__ = (Index("ix_task_tombstone_created_at", "created_at"),)

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    status: Mapped[TaskStatus]
    payload_sha: Mapped[str]  # of the payload as PostgreSQL writes it
    created_at: Mapped[Stamp]


class TaskStep(Base):
    """The remembered result of one step of a task (P11): the first write wins, by the primary key."""

    __tablename__ = "task_step"

    task_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    result: Mapped[Json | None]
    created_at: Mapped[Stamp]
