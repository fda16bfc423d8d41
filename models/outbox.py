"""The outbox: messages to other systems, written in the same transaction as the change that they report.

`INSERT INTO outbox_event (destination, payload) VALUES (…)` is a complete event: NEW, due now, without a lease. An
event is published at least once. It can be claimed while it is NEW or RETRYING, due, and without a live lease. The
claim writes a lease token, and only its holder may write SENT, RETRYING or DEAD.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Final

from sqlalchemy import BigInteger, Identity, Index, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import FREQUENT_UPDATES, Base, Count, Json, JsonObject, Number, Stamp, checks, one_of
from models.status import EventStatus

_DUE_AT: Final = text("coalesce(next_retry_at, '-infinity')")
_UNORDERED: Final = text("status IN ('NEW', 'RETRYING') AND ordering_key IS NULL")
_ORDERED: Final = text("ordering_key IS NOT NULL AND status <> 'SENT'")
_UNREACHABLE: Final = text("status IN ('RETRYING', 'DEAD') AND last_error LIKE 'unreachable: %'")
_IDS: Final = text("(payload -> 'ids')")
_DEAD_WAKEUPS: Final = text("status = 'DEAD' AND destination LIKE 'celery:%'")
_IDENTITY: Final = text("coalesce(dedup_key, payload_sha)")
_IDENTIFIED: Final = text("status = 'SENT' AND coalesce(dedup_key, payload_sha) IS NOT NULL")


class OutboxEvent(Base):
    """One message to one destination."""

    __table_args__ = (
        *checks(
            status=one_of("status", EventStatus),
            sent_has_a_time="(status = 'SENT') = (sent_at IS NOT NULL)",
            lease="(lease_token IS NULL) = (lease_until IS NULL)",
            final_holds_no_lease="status IN ('NEW', 'RETRYING') OR lease_token IS NULL",
            attempt_count="attempt_count >= 0",
        ),
        # The relay claims unsent events by destination, the longest due first. Each destination is a range of its own,
        # so skipping one costs nothing. Events scheduled for later lie behind the end of the range: a claim of 200
        # among 1,000,000 sent, 1,000,000 scheduled and 100,000 due events costs as much as in an empty table. No index
        # has the lease columns, so claiming and renewing stay heap-only updates.
        Index("ix_outbox_event_unsent", "destination", _DUE_AT, "id", postgresql_where=_UNORDERED),
        # Of each ordering key only the first event that is not SENT can be claimed.
        Index("ix_outbox_event_ordered", "destination", "ordering_key", "id", postgresql_where=_ORDERED),
        # When a destination answers again, events that failed because it was unreachable are due at once.
        Index("ix_outbox_event_unreachable", "destination", "status", postgresql_where=_UNREACHABLE),
        # check_dedup looks for a SENT event. Wake-ups have no payload_sha, so they are not in it.
        Index("ix_outbox_event_dedup", "destination", _IDENTITY, postgresql_where=_IDENTIFIED),
        # Pruning deletes the oldest SENT events; operators list the dead ones.
        Index("ix_outbox_event_sent", "sent_at", postgresql_where=text("status = 'SENT'")),
        Index("ix_outbox_event_dead", "id", postgresql_where=text("status = 'DEAD'")),
        # A task that is woken again replaces its dead wake-up.
        Index("ix_outbox_event_dead_wakeups", _IDS, postgresql_using="gin", postgresql_where=_DEAD_WAKEUPS),
        {"postgresql_with": FREQUENT_UPDATES},
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=False), primary_key=True)
    destination: Mapped[str]
    payload: Mapped[Json]
    payload_sha: Mapped[str | None]  # a trigger fills it in, except for wake-ups
    headers: Mapped[JsonObject]
    # "C" sorts by bytes, which is also how Python sorts strings.
    ordering_key: Mapped[str | None] = mapped_column(Text(collation="C"))
    status: Mapped[str] = mapped_column(server_default="NEW")
    attempt_count: Mapped[Count]
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
    """The result of one attempt to send: an `outbox_flush_*` code. An error of a whole claim has no event."""

    # Lists the lost leases, the latest first, among the entries of all events that were sent.
    __table_args__ = (Index("ix_outbox_audit_refused", "id", postgresql_where=text("code = 'outbox_flush_conflict'")),)

    id: Mapped[Number]
    outbox_id: Mapped[int | None] = mapped_column(BigInteger, index=True)  # reads or prunes the audit of one event
    code: Mapped[str]
    worker_id: Mapped[str]
    detail: Mapped[str | None]
    created_at: Mapped[Stamp]
