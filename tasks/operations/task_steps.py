"""Read the steps that a task has finished, and its places in loops."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection

from models.sql import sql

MOST_STEPS: Final = 200


@dataclass(frozen=True, slots=True)
class StoredStep:
    """The stored result of one step, or the place in a loop."""

    name: str
    result: Any
    created_at: datetime


# steps: those that a task has finished, the first first.
STEPS: Final = sql(f"""
    SELECT name, result, created_at FROM ledger.task_step WHERE task_id = :id
    ORDER BY created_at, name LIMIT {MOST_STEPS}
""")


def read_steps(connection: Connection, task_id: uuid.UUID) -> list[StoredStep]:
    """Return the finished steps of a task, at most MOST_STEPS."""
    return [StoredStep(*row) for row in connection.execute(STEPS, {"id": task_id})]
