"""The log of transactions in other systems. The ledger decides; a transaction without a decision is aborted.

See docs/protocol.md, Two-phase.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, CheckConstraint, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Base, EnumText, JsonObject, Stamp, status_check


class Decision(StrEnum):
    """What the ledger decided. A decision never changes; without one, recovery aborts."""

    COMMIT = "commit"
    ABORT = "abort"


class SinkState(StrEnum):
    """What is known about the sink. `open`: the handle is stored, and PREPARE may or may not have happened."""

    OPEN = "open"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"
    FAILED = "failed"


class SinkTransaction(Base):
    """The transaction of one attempt in one sink, identified by its gid."""

    __tablename__ = "sink_transaction"
    __table_args__ = (
        CheckConstraint("octet_length(gid) BETWEEN 1 AND 199", name="gid"),
        CheckConstraint("num_nonnulls(task_id, checkpoint_id) >= 1", name="has_an_origin"),
        status_check("decision", Decision),
        status_check("state", SinkState),
        CheckConstraint("(decision IS NULL) = (decided_at IS NULL)", name="decision_has_a_time"),
        CheckConstraint(
            "CASE state WHEN 'committed' THEN decision IS NOT DISTINCT FROM 'commit'"
            " WHEN 'aborted' THEN decision IS NOT DISTINCT FROM 'abort' ELSE true END",
            name="state_follows_decision",
        ),
        # Finds the transactions of a task: reclaim must abort them before it frees the task.
        Index("ix_sink_transaction_task_id", "task_id"),
        # Recovery reads the unfinished rows, which are few in a table that keeps all.
        Index(
            "ix_sink_transaction_unfinished",
            "created_at",
            postgresql_where=text("state NOT IN ('committed', 'aborted')"),
        ),
    )

    gid: Mapped[str] = mapped_column(primary_key=True)
    task_id: Mapped[uuid.UUID | None]
    checkpoint_id: Mapped[int | None] = mapped_column(BigInteger)
    sink: Mapped[str]
    handle: Mapped[JsonObject]
    lease_token: Mapped[uuid.UUID | None]
    decision: Mapped[Decision | None] = mapped_column(EnumText(Decision))
    state: Mapped[SinkState] = mapped_column(EnumText(SinkState), server_default="open")
    created_at: Mapped[Stamp]
    decided_at: Mapped[datetime | None]
