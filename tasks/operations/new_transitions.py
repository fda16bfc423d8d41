"""Read what has happened to many tasks since a position in the history of each, with one statement."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection

from models.sql import sql
from tasks.operations.listing import columns_of
from tasks.operations.task_details import Transition

MOST_PER_TASK: Final = 100

# new_transitions: one range of the primary key per task. The ids of one task follow the order of its changes, because
# each change is written while the task's row is locked.
NEW_TRANSITIONS: Final = sql(f"""
    SELECT watched.task_id, found.*
    FROM unnest(CAST(:ids AS uuid[]), CAST(:after AS bigint[])) AS watched(task_id, after)
    CROSS JOIN LATERAL (
        SELECT {columns_of(Transition)} FROM ledger.ingest_task_transition AS told
        WHERE told.task_id = watched.task_id AND told.id > watched.after
        ORDER BY told.id LIMIT {MOST_PER_TASK}) AS found
    ORDER BY found.id
""")


def read_new_transitions(
    connection: Connection, positions: Mapping[uuid.UUID, int]
) -> list[tuple[uuid.UUID, Transition]]:
    """Return, for each task, its first transitions with a larger id than its position, oldest first."""
    values = {"ids": list(positions), "after": list(positions.values())}
    return [(task_id, Transition(*row)) for task_id, *row in connection.execute(NEW_TRANSITIONS, values)]
