"""Receipts that were given for what is in the ledger, or cannot be, and the switches of the express lane."""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum

from sqlalchemy import Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Actor, Base, Json, Number, Stamp, checks, one_of


class Level(StrEnum):
    """What a receipt says. `accepted` is known to Redis only, so the ledger has the other two."""

    ACCEPTED = "accepted"
    SAVED = "saved"
    REJECTED = "rejected"


class Switch(StrEnum):
    """What operators can change at run time; without a row, the setting of the same name applies."""

    TWO_PHASE = "two_phase"
    DELIVER_BEFORE_SAVED = "deliver_before_saved"
    FAIL_OPEN = "fail_open"


class Receipt(Base):
    """Proof that an accepted message was saved, or why it never can be. `seq` is the `ledgerSeq` of the receipt."""

    __table_args__ = (
        # A message that is saved again after a crash keeps its receipt. A rejected one may have been saved before,
        # with another payload.
        UniqueConstraint("id", "level"),
        *checks(
            level=one_of("level", (Level.SAVED, Level.REJECTED)),
            rejected_has_a_reason="(level = 'rejected') = (code IS NOT NULL) AND (code IS NULL) = (reason IS NULL)",
            promise="promised_by >= accepted_at",
        ),
        # Lists what was rejected, newest first.
        Index("ix_receipt_rejected", "seq", postgresql_where=text("level = 'rejected'")),
        # Finds receipts that are older than their retention.
        Index("ix_receipt_saved_at", "saved_at"),
    )

    seq: Mapped[Number]
    id: Mapped[uuid.UUID]
    level: Mapped[str]
    kind: Mapped[str]
    principal: Mapped[str]
    client_id: Mapped[str | None]
    payload_sha: Mapped[str]
    policy: Mapped[str]
    is_ordered: Mapped[bool] = mapped_column(server_default=text("true"))
    accepted_at: Mapped[datetime]
    promised_by: Mapped[datetime]
    saved_at: Mapped[Stamp]
    code: Mapped[str | None]
    reason: Mapped[str | None]
    entry: Mapped[Json | None]  # what was rejected
    task_id: Mapped[uuid.UUID | None]  # of a document, whose task is known when it is saved; NULL: the id


class ReceiptSwitch(Base):
    """A switch that an operator has set."""

    __table_args__ = checks(name=one_of("name", Switch))

    name: Mapped[str] = mapped_column(primary_key=True)
    is_on: Mapped[bool]
    actor: Mapped[Actor]
    changed_at: Mapped[Stamp]
