"""The handlers of Celeriac in the benchmark: `INGEST_HANDLERS=bench.peers.our_handlers`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from sqlalchemy import text
from sqlalchemy.orm import Session

from bench.peers.effect import VALUE, pass_gate
from tasks import Task, handler

MANY: Final = 1000
SMALL_TASKS: Final = 1000  # batch size for tasks that take almost no time
ONE_ROW: Final = text("INSERT INTO bench_sink (n, value) VALUES (:n, :value)")
# the same statement as in raw_sql.py
MANY_ROWS: Final = text("INSERT INTO bench_sink (n, value) SELECT n, :value FROM unnest(CAST(:n AS bigint[])) AS n")


@handler("bench.task")
def insert(task: Task, db: Session) -> None:
    db.execute(ONE_ROW, {"n": task.payload["n"], "value": VALUE})


@handler("bench.small", batch=SMALL_TASKS)
def insert_small(task: Task, db: Session) -> None:
    insert(task, db)


@handler("bench.many", many=True, batch=MANY)
def insert_many(tasks: Sequence[Task], db: Session) -> None:
    db.execute(MANY_ROWS, {"n": [task.payload["n"] for task in tasks], "value": VALUE})


@handler("bench.start")
def start(task: Task, db: Session) -> None:
    started_at = time.monotonic()
    db.execute(ONE_ROW, {"n": task.payload["n"], "value": repr(started_at)})


@handler("bench.gate", batch=1)
def gate(_task: Task, _db: Session) -> None:
    """Wait at the gate. This is a task of its own, so that the first claim of the measured tasks is measured too."""
    pass_gate()
