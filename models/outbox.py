"""The outbox: what is to be told to the world outside, written in the transaction that made it true.

`INSERT INTO outbox_event (destination, payload) VALUES (…)` is a complete event: NEW, due at once, with no lease.
"""

from __future__ import annotations

import uuid
from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, Identity, Index, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import HOT, Base, Json, JsonObject, Stamp, status_check
from models.status import EventStatus


class OutboxEvent(Base):
    """One message to one destination. Claimable (P17): NEW or RETRYING, due, and without a live lease."""

    __tablename__ = "outbox_event"
    __table_args__ = (
        status_check("status", EventStatus),
        CheckConstraint("(status = 'SENT') = (sent_at IS NOT NULL)", name="sent_has_a_time"),
        CheckConstraint("(lease_token IS NULL) = (lease_until IS NULL)", name="lease"),
        CheckConstraint("status IN ('NEW', 'RETRYING') OR lease_token IS NULL", name="final_holds_no_lease"),
        CheckConstraint("attempt_count >= 0", name="attempt_count"),
        # The relay claims what is unsent, destination by destination, oldest due first. A destination is a range of its
        # own, so one that is left out costs nothing, and events scheduled for later lie behind the end of the range: a
        # claim of 200 among 1,000,000 sent, 1,000,000 scheduled and 100,000 due events costs what it costs without a
        # history. The lease columns are in no index, so claiming and renewing stay HOT.
        Index(
            "ix_outbox_event_unsent",
            "destination",
            text("coalesce(next_retry_at, '-infinity')"),
            "id",
            postgresql_where=text("status IN ('NEW', 'RETRYING') AND ordering_key IS NULL"),
        ),
        # Ordered keys are claimed by their head (P20): the first of each key that is not SENT. Those behind it are in
        # nobody's way.
        Index(
            "ix_outbox_event_ordered",
            "destination",
            "ordering_key",
            "id",
            postgresql_where=text("ordering_key IS NOT NULL AND status <> 'SENT'"),
        ),
        # A destination that answers again: what failed because it did not is due at once (P19).
        Index("ix_outbox_event_retrying", "destination", postgresql_where=text("status = 'RETRYING'")),
        # check_dedup: was this sent to this destination? Wake-ups carry no payload_sha and stay out of it.
        Index(
            "ix_outbox_event_dedup",
            "destination",
            text("coalesce(dedup_key, payload_sha)"),
            postgresql_where=text("status = 'SENT' AND coalesce(dedup_key, payload_sha) IS NOT NULL"),
        ),
        # Pruning takes the oldest; an operator looks at the dead.
        Index("ix_outbox_event_sent", "sent_at", postgresql_where=text("status = 'SENT'")),
        Index("ix_outbox_event_dead", "id", postgresql_where=text("status = 'DEAD'")),
        {"postgresql_with": HOT},
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=False), primary_key=True)
    destination: Mapped[str]
    payload: Mapped[Json]
    payload_sha: Mapped[str | None]
    headers: Mapped[JsonObject]
    # "C": the order of its bytes, which is also the order of Python's strings
    ordering_key: Mapped[str | None] = mapped_column(Text(collation="C"))
    status: Mapped[EventStatus] = mapped_column(server_default="NEW")
    attempt_count: Mapped[int] = mapped_column(server_default=text("0"))
    next_retry_at: Mapped[datetime | None]
    locked_by: Mapped[str | None]
    locked_at: Mapped[datetime | None]
    lease_token: Mapped[uuid.UUID | None]
    lease_until: Mapped[datetime | None]
    last_error: Mapped[str | None]
    external_id: Mapped[str | None]
    created_at: Mapped[Stamp]
    sent_at: Mapped[datetime | None]
    dedup_key: Mapped[str | None]


class OutboxAudit(Base):
    """What became of one attempt to send, by its `outbox_flush_*` code. An error of the whole claim names no event."""

    __tablename__ = "outbox_audit"
    # The audit of one event, on its page and when it is pruned.
    __table_args__ = (Index("ix_outbox_audit_outbox_id", "outbox_id"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    outbox_id: Mapped[int | None] = mapped_column(BigInteger)
    code: Mapped[str]
    worker_id: Mapped[str]
    detail: Mapped[str | None]
    created_at: Mapped[Stamp]
