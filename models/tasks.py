"""Tasks, their history, and the leases on them.

`ingest_task` is authoritative: a task exists if its row is committed, and its status is the one in the row. A broker
message only says that a task may run. `task_lease` is the right to run a batch of RUNNING tasks. Its token is in every
statement of its holder: a statement that finds another token in the task's row updates nothing, which means that the
lease is lost and the holder must stop. An expired lease can be reclaimed; until that happens its holder may still
settle.

There are no foreign keys: each insert would lock rows of another table. No index covers a column that only claiming and
settling change: reclaim finds the tasks of a lost lease through `task_lease.task_ids`.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Final

from sqlalchemy import BigInteger, Identity, Index, PrimaryKeyConstraint, Sequence, SmallInteger, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import FREQUENT_UPDATES, Actor, Base, Count, Flag, Json, JsonObject, Number, Stamp, checks, one_of
from models.status import TASK_TRANSITIONS, TaskStatus


def _transition_rule() -> str:
    """Return TASK_TRANSITIONS as a CASE. (A chain of ORs would be NULL if from_status is, and a CHECK accepts NULL.)"""
    cases = []
    for source, targets in TASK_TRANSITIONS.items():
        if targets:
            condition = "from_status IS NULL" if source is None else f"from_status = '{source}'"
            cases.append(f"WHEN {condition} THEN {one_of('to_status', sorted(targets))}")
    return f"CASE {' '.join(cases)} ELSE false END"


# Exactly as PostgreSQL prints it, because Alembic compares the texts.
_DUE_AT: Final = text("""(
CASE
WHEN partition_key IS NULL AND limited_at IS NULL THEN coalesce(next_retry_at, '-infinity')
ELSE 'infinity'
END)""")
_OPEN: Final = text("status IN ('QUEUED', 'RETRYING')")
_KEYED_AND_UNFINISHED: Final = text("partition_key IS NOT NULL AND status NOT IN ('SUCCEEDED', 'DISCARDED')")
_PRINCIPAL: Final = text("(context ->> 'principal')")
_CHANGED_AT: Final = text("COALESCE(finished_at, updated_at)")
_HAS_PRINCIPAL: Final = text("context ->> 'principal' IS NOT NULL AND status <> 'RUNNING'")
KEY_SEQ: Final = Sequence("ingest_task_key_seq", metadata=Base.metadata)


class IngestTask(Base):
    """A promised piece of work. The submitter makes its id, so that every way of submitting gives a key the same id."""

    __table_args__ = (
        *checks(
            status=one_of("status", TaskStatus),
            running_is_leased="(status = 'RUNNING') = (lease_token IS NOT NULL)",
            final_is_finished="(status IN ('SUCCEEDED', 'DEAD', 'DISCARDED')) = (finished_at IS NOT NULL)",
            next_retry_at="CASE status WHEN 'RETRYING' THEN next_retry_at IS NOT NULL"
            " WHEN 'SUCCEEDED' THEN next_retry_at IS NULL WHEN 'DEAD' THEN next_retry_at IS NULL ELSE true END",
            priority="priority BETWEEN 0 AND 9",
            attempt_count="attempt_count >= 0",
            max_attempts="max_attempts >= 1",
            limited_waits="limited_at IS NULL"
            " OR (limit_key IS NOT NULL AND status IN ('QUEUED', 'RETRYING', 'DISCARDED'))",
            expires_before_start="expires_at IS NULL OR status IN ('QUEUED', 'DISCARDED')",
            partition_key="(partition_key IS NULL) = (key_seq IS NULL)",
            error_together="(last_error IS NULL) = (error_message IS NULL)",
            last_error="length(last_error) <= 4000",
            error_message="length(error_message) <= 500",
        ),
        # A claim that fills its batch, lost wake-ups and statistics read the due tasks of one queue and type. Tasks
        # that are due later lie behind that range, so a million of them cost nothing. So do tasks with a partition key,
        # which wait for each other, and tasks that wait for a limit.
        Index("ix_ingest_task_due", "queue", "type", _DUE_AT, "id", postgresql_where=_OPEN),
        # Finds the first task of a partition key, and the next one. Finished tasks are not in it.
        Index("ix_ingest_task_key", "partition_key", "key_seq", postgresql_where=_KEYED_AND_UNFINISHED),
        # Finds the tasks that wait for a limit, in their order.
        Index(
            "ix_ingest_task_limited",
            "type",
            "limit_key",
            text("priority DESC"),
            "limited_at",
            "id",
            postgresql_where=text("limited_at IS NOT NULL AND status IN ('QUEUED', 'RETRYING')"),
        ),
        # Finds the tasks that have expired before they started. Tasks without expiry are not in it.
        Index(
            "ix_ingest_task_expires",
            "expires_at",
            postgresql_where=text("expires_at IS NOT NULL AND status = 'QUEUED'"),
        ),
        # Counts the running tasks of a limit. Tasks of types without limits are not in it.
        Index(
            "ix_ingest_task_running",
            "type",
            "limit_key",
            postgresql_where=text("limit_key IS NOT NULL AND status = 'RUNNING'"),
        ),
        # Lists dead tasks by age, page by page, among millions of finished tasks.
        Index("ix_ingest_task_dead", "finished_at", "id", postgresql_where=text("status = 'DEAD'")),
        # Groups dead tasks by error, and finds those of one group.
        Index(
            "ix_ingest_task_dead_errors",
            "type",
            "error_fingerprint",
            "finished_at",
            postgresql_where=text("status = 'DEAD'"),
        ),
        # Lists show the tasks that changed last.
        Index("ix_ingest_task_open", "updated_at", postgresql_where=_OPEN),
        # Lists the tasks of one principal of the API by their last change. Tasks that were not submitted over HTTP are
        # not in it. Running tasks are found through their leases, which saves an entry for each run.
        Index("ix_ingest_task_principal", _PRINCIPAL, _CHANGED_AT, "id", postgresql_where=_HAS_PRINCIPAL),
        # Pruning deletes the oldest finished tasks.
        Index("ix_ingest_task_done", "finished_at", postgresql_where=text("status IN ('SUCCEEDED', 'DISCARDED')")),
        # List the few that retry among a million that wait, and the few discarded ones among those that succeeded.
        Index("ix_ingest_task_retrying", "updated_at", "id", postgresql_where=text("status = 'RETRYING'")),
        Index("ix_ingest_task_discarded", "finished_at", "id", postgresql_where=text("status = 'DISCARDED'")),
        {"postgresql_with": FREQUENT_UPDATES},
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    type: Mapped[str]
    payload: Mapped[Json]
    context: Mapped[JsonObject]
    queue: Mapped[str] = mapped_column(server_default="ingest")
    priority: Mapped[int] = mapped_column(SmallInteger, server_default=text("5"))
    partition_key: Mapped[str | None] = mapped_column(Text(collation="C"))
    key_seq: Mapped[int | None] = mapped_column(BigInteger)  # drawn under a lock of the key: the order of commits
    idempotency_key: Mapped[str | None]
    status: Mapped[str] = mapped_column(server_default="QUEUED")
    attempt_count: Mapped[Count]
    max_attempts: Mapped[int] = mapped_column(server_default=text("10"))
    next_retry_at: Mapped[datetime | None]
    last_wakeup_at: Mapped[datetime | None]
    lease_token: Mapped[uuid.UUID | None]
    isolated: Mapped[Flag]
    limit_key: Mapped[str | None] = mapped_column(Text(collation="C"))  # the value of `limit_by`
    limited_at: Mapped[datetime | None]  # since when it waits for its limit
    expires_at: Mapped[datetime | None]  # discarded if it has not started by then; a claim clears it
    last_error: Mapped[str | None]
    error_message: Mapped[str | None]
    error_code: Mapped[str | None]
    error_fingerprint: Mapped[str | None]  # ingest_error_fingerprint(error_code, error_message)
    result: Mapped[Json | None]
    notify: Mapped[str | None]
    created_at: Mapped[Stamp]
    updated_at: Mapped[Stamp]
    finished_at: Mapped[datetime | None]


class IngestTaskTransition(Base):
    """One change of status, written in the transaction that made it."""

    __table_args__ = (
        *checks(way=_transition_rule(), attempt_count="attempt_count >= 0"),
        # One index both reads the history of a task in order and prunes it: every change of a task inserts here.
        PrimaryKeyConstraint("task_id", "id"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True))
    task_id: Mapped[uuid.UUID]
    from_status: Mapped[str | None]
    to_status: Mapped[str]
    attempt_count: Mapped[Count]
    message: Mapped[str | None]
    actor: Mapped[Actor]
    created_at: Mapped[Stamp]


class TaskLease(Base):
    """The right to run and settle a batch of tasks. Renewing updates this one row; reclaim scans this small table.

    There is no index on `lease_until`: the table has one row per running batch, and renewals stay heap-only updates.
    """

    __table_args__ = (*checks(priority="priority BETWEEN 0 AND 9"), {"postgresql_with": FREQUENT_UPDATES})

    token: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    holder: Mapped[str]
    lease_until: Mapped[datetime]
    task_ids: Mapped[list[uuid.UUID]]
    type: Mapped[str]
    queue: Mapped[str]
    priority: Mapped[int] = mapped_column(SmallInteger)
    claimed_at: Mapped[Stamp]
    last_wakeup_at: Mapped[datetime | None]  # the latest among the tasks that the message named
    is_extended: Mapped[bool] = mapped_column(server_default=text("false"))  # reclaim gave extra time, once
    reason: Mapped[str | None]  # why its process was killed, if the hard limit ended it


class WakeupHorizon(Base):
    """How far the broker has delivered the wake-ups of a queue and priority (docs/protocol.md, Lost wake-ups).

    A task whose last wake-up is older than `passed_wakeup_at` and that still waits has lost it. A task woken at
    `seen_wakeup_at` was claimed at `seen_at`; when a grace has passed since, that becomes `passed_wakeup_at`.
    """

    queue: Mapped[str] = mapped_column(primary_key=True)
    priority: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    seen_wakeup_at: Mapped[datetime]
    seen_at: Mapped[datetime]
    passed_wakeup_at: Mapped[datetime | None]


class TaskAudit(Base):
    """What a holder did after it had lost its lease, such as `late_success`."""

    # Lists what was refused, the latest first, among other entries.
    __table_args__ = (
        Index("ix_task_audit_refused", "id", postgresql_where=text("code IN ('late_success', 'lease_lost')")),
    )

    id: Mapped[Number]
    task_id: Mapped[uuid.UUID] = mapped_column(index=True)  # reads or prunes the audit of one task
    code: Mapped[str]
    worker_id: Mapped[str]
    detail: Mapped[str | None]
    created_at: Mapped[Stamp]


class TaskTombstone(Base):
    """The rest of a pruned task that had an idempotency key: submitting the key again returns this task."""

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    status: Mapped[str]
    payload_sha: Mapped[str]  # the hash of the payload as PostgreSQL prints it
    created_at: Mapped[Stamp] = mapped_column(index=True)  # tombstones are pruned by age


class TaskStep(Base):
    """The stored result of one step of a task, or the place in a loop."""

    task_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    result: Mapped[Json | None]
    created_at: Mapped[Stamp]
