"""A task as its handler sees it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """One claimed task."""

    id: uuid.UUID
    type: str
    payload: Any
    context: Mapping[str, Any]
    queue: str
    priority: int
    attempt_count: int  # failures so far
    max_attempts: int
    key: str | None  # the idempotency key
    due_at: datetime | None  # None: it was due from the start, and this is its first run
    created_at: datetime
