"""What became of one entry when a batch was saved."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID


class Saved(NamedTuple):
    """It is in the ledger; `is_new` is False if it was there before this batch."""

    seq: int
    saved_at: datetime
    is_new: bool = True
    task_id: UUID | None = None  # of a document


@dataclass(frozen=True, slots=True)
class Rejected:
    """It can never be saved."""

    code: str
    reason: str


SaveResult = Saved | Rejected
