"""Fill an empty broker: send a wake-up for every due task, after a flush or with a new broker.

This only reads the ledger and writes wake-ups, so it is safe at any time, also while workers run: a task that is woken
twice runs once. Tasks that are locked, or that changed or became due after the start, are left out. They have wake-ups
of their own, and with a steady stream of new tasks the rebuild would never end. Tasks of paused queues are left out,
too: resuming a queue wakes its tasks in the same way (`tasks/operations/pauses.py`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from models.clock import now
from models.sql import sql
from tasks.core.due_times import DUE_AT, IS_PAUSED, KINDS, OPEN, TIME
from tasks.core.registry import DEFAULT_BATCH, handlers
from tasks.core.wakeups import Woken, wake_again

PAGE: Final = 1000
# Tasks with a partition key, and those that wait for a limit, come last in the index. They are woken whether or not it
# is their turn; the claim knows.
_DUE: Final = f"({DUE_AT} <= :until OR {DUE_AT} = 'infinity') AND {TIME} <= :until"

# count_due: the number of due tasks of each queue and type that has open tasks.
COUNT_DUE: Final = sql(f"""
    WITH RECURSIVE {KINDS}
    SELECT queue, type, (SELECT count(*) FROM ledger.ingest_task task
                         WHERE task.queue = kind.queue AND task.type = kind.type AND {OPEN} AND {_DUE})
    FROM kind WHERE NOT {IS_PAUSED}
""")
OPEN_KINDS: Final = sql(f"""
    WITH RECURSIVE {KINDS} SELECT queue, type FROM kind
    WHERE NOT {IS_PAUSED} AND queue = coalesce(CAST(:queue AS text), queue)
""")
# due_page: due tasks of one queue and type, longest due first.
DUE_PAGE: Final = sql(f"""
    SELECT id, CAST({DUE_AT} AS text) FROM ledger.ingest_task
    WHERE queue = :queue AND type = :type AND {OPEN} AND {_DUE} AND updated_at <= :until
      AND ({DUE_AT}, id) > (:due, :id) ORDER BY {DUE_AT}, id LIMIT :page
""")


@dataclass(frozen=True, slots=True)
class DueKind:
    """The number of due tasks of one queue and type."""

    queue: str
    type: str
    count: int


def count_due(connection: Connection) -> list[DueKind]:
    """Count the tasks that `wake_all_due` would wake."""
    found = [DueKind(*row) for row in connection.execute(COUNT_DUE, {"until": now(connection)})]
    return [kind for kind in found if kind.count]


def wake_all_due(engine: Engine, *, queue: str | None = None) -> Iterator[Woken]:
    """Wake all due tasks, or those of one queue, page by page; yield the total so far after each page."""
    with engine.connect() as connection:
        until = now(connection)
        kinds = connection.execute(OPEN_KINDS, {"queue": queue}).all()
    total = Woken()
    for kind in kinds:
        for page in _wake_kind(engine, kind.queue, kind.type, until):
            total += page
            yield total


def _wake_kind(engine: Engine, queue: str, type_: str, until: datetime) -> Iterator[Woken]:
    batch = handlers()[type_].batch if type_ in handlers() else DEFAULT_BATCH
    page = max(batch, PAGE // batch * batch)  # so that only the last wake-up is not full
    due, last = "-infinity", uuid.UUID(int=0)
    while True:
        with Session(engine) as db:
            values = {"queue": queue, "type": type_, "until": until, "due": due, "id": last, "page": page}
            found = db.execute(DUE_PAGE, values).all()
            if not found:
                return
            woken = wake_again(db, [row.id for row in found], queues=[queue])
            db.commit()
        last, due = found[-1]
        yield woken
