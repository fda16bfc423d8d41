"""A receipt: what was promised, or done, for one message. JSON names are camelCase; `signing.py` signs them.

accepted    the message is on the disk of the receipt log; by `promisedBy` it will be saved or rejected
saved       the message is in the ledger, as number `ledgerSeq`
rejected    the message can never be saved, for the reason given
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from models.receipts import Level

# What made the first receipt durable. A change of these words would change the meaning of signed receipts.
AOF_ALWAYS: Final = "aof-always"  # Redis wrote the entry to its append-only file and called fsync before it answered
COMMIT: Final = "postgresql-commit"  # PostgreSQL committed it, with its synchronous_commit
LATEST_MS: Final = 221_845_392_000_000  # the year 9000: Python can also express what is promised after it


@dataclass(frozen=True, slots=True)
class Receipt:
    """One receipt. `client_id` is the id that the client chose, `sha256` the hash of the payload's canonical JSON."""

    level: Level
    id: uuid.UUID
    kind: str
    principal: str
    sha256: str
    accepted_at: datetime
    promised_by: datetime
    client_id: str | None = None
    policy: str = AOF_ALWAYS
    duplicate: bool = False
    ordered: bool = True  # False if the message may have overtaken earlier ones of the same sender
    saved_at: datetime | None = None
    ledger_seq: int | None = None
    code: str | None = None
    reason: str | None = None
    task_id: uuid.UUID | None = None  # of a document, when it is saved; all others have the task id from the start

    def fields(self) -> dict[str, Any]:
        """Return what is signed. A field that does not belong to the level is left out."""
        shown: dict[str, Any] = {
            "level": self.level.value,
            "id": str(self.id),
            "taskId": self._shown_task_id(),
            "clientId": self.client_id,
            "sha256": self.sha256,
            "duplicate": self.duplicate,
            "ordered": self.ordered,
            "policy": self.policy,
            "acceptedAt": utc(self.accepted_at),
            "promisedBy": utc(self.promised_by),
        }
        if self.saved_at is not None:
            shown["savedAt" if self.level is Level.SAVED else "rejectedAt"] = utc(self.saved_at)
            shown["ledgerSeq"] = self.ledger_seq
        if self.level is Level.REJECTED:
            shown |= {"code": self.code, "reason": self.reason}
        return shown

    def _shown_task_id(self) -> str | None:
        if self.kind == "documents":
            return str(self.task_id) if self.task_id else None
        return str(self.id)


def utc(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds")


def from_milliseconds(milliseconds: float | str) -> datetime:
    """Return a time of Redis, which is given in milliseconds since 1970; raise ValueError if it cannot be one."""
    given = int(milliseconds)
    if not 0 <= given <= LATEST_MS:
        raise ValueError("the time is out of range")
    return datetime.fromtimestamp(given / 1000, UTC)


def milliseconds(time: datetime) -> int:
    return round(time.timestamp() * 1000)
