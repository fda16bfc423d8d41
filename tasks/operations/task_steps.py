"""Read the steps that a task has finished, and its places in loops."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection

from models.sql import sql

MOST_STEPS: Final = 200
MOST_SHOWN: Final = 300  # characters of a result
LARGE: Final = 32 * 1024  # bytes as it is stored; a larger result is not read: 200 of them take seconds


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A finished step, or the place in a loop."""

    name: str
    result: str | None  # as JSON, or the beginning of it; None: it is large, and was not read
    size: int  # bytes as it is stored
    is_cut: bool
    created_at: datetime


# steps: those that a task has finished, the first first. The size of a large result is known without reading it.
STEPS: Final = sql(f"""
    WITH step AS MATERIALIZED (
        SELECT name, created_at, result, coalesce(pg_column_size(result), 0) AS size,
               CASE WHEN result IS NULL THEN 'null'
                    WHEN pg_column_size(result) <= {LARGE} THEN CAST(result AS text) END AS written
        FROM ledger.task_step WHERE task_id = :id ORDER BY created_at, name LIMIT {MOST_STEPS})
    SELECT name, CASE WHEN length(written) <= {MOST_SHOWN} THEN coalesce(jsonb_pretty(result), written)
                      ELSE left(written, {MOST_SHOWN}) END,
           size, coalesce(length(written), 0) > {MOST_SHOWN}, created_at
    FROM step ORDER BY created_at, name
""")


def read_steps(connection: Connection, task_id: uuid.UUID) -> list[StoredStep]:
    """Return the finished steps of a task, at most MOST_STEPS, with the beginnings of their results."""
    return [StoredStep(*row) for row in connection.execute(STEPS, {"id": task_id})]
