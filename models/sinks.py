"""Sinks: the log of transactions in other systems, the identity of this ledger there, and which type uses which sink.

The ledger decides about transactions; one without a decision is aborted. See docs/protocol.md, Two-phase.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum
from typing import Final

from sqlalchemy import BigInteger, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Base, JsonObject, Stamp, checks, one_of

_UNFINISHED: Final = text("state NOT IN ('committed', 'aborted')")


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

    __table_args__ = (
        *checks(
            gid="octet_length(gid) BETWEEN 1 AND 199",
            has_an_origin="num_nonnulls(task_id, checkpoint_id) >= 1",
            decision=one_of("decision", Decision),
            state=one_of("state", SinkState),
            decision_has_a_time="(decision IS NULL) = (decided_at IS NULL)",
            state_follows_decision="CASE state WHEN 'committed' THEN decision IS NOT DISTINCT FROM 'commit'"
            " WHEN 'aborted' THEN decision IS NOT DISTINCT FROM 'abort' ELSE true END",
        ),
        # Recovery reads the unfinished rows, which are few in a table that keeps all.
        Index("ix_sink_transaction_unfinished", "created_at", postgresql_where=_UNFINISHED),
    )

    gid: Mapped[str] = mapped_column(primary_key=True)
    # Reclaim finds the transactions of a task, which it must abort before it frees the task.
    task_id: Mapped[uuid.UUID | None] = mapped_column(index=True)
    checkpoint_id: Mapped[int | None] = mapped_column(BigInteger)
    sink: Mapped[str]
    handle: Mapped[JsonObject]
    lease_token: Mapped[uuid.UUID | None]
    decision: Mapped[str | None]
    state: Mapped[str] = mapped_column(server_default="open")
    created_at: Mapped[Stamp]
    decided_at: Mapped[datetime | None]


class Installation(Base):
    """The identity of this ledger in other systems. A new ledger never touches what an older one has left there."""

    __table_args__ = checks(only_row="only_row")

    only_row: Mapped[bool] = mapped_column(primary_key=True, server_default=text("true"))
    id: Mapped[uuid.UUID] = mapped_column(server_default=text("gen_random_uuid()"))


class SinkUse(Base):
    """Tasks of this type have used this sink, so it may have effects of them."""

    type: Mapped[str] = mapped_column(primary_key=True)
    sink: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[Stamp]
