"""The handlers of Celeriac in the benchmark: `INGEST_HANDLERS=bench.peers.our_handlers`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import cache
from typing import Final

import httpx2
from sqlalchemy import text
from sqlalchemy.orm import Session

from bench.peers.effect import AT_ONCE, INSERT, PROCESSES, VALUE, concurrency, pass_gate, slow_url
from models.guarded_session import GuardedSession
from tasks import Task, handler

MANY: Final = 1000
HUNDRED: Final = 100
SHORT_SECONDS: Final = 0.05
LONG_SECONDS: Final = 30.0
ONE_ROW: Final = text("INSERT INTO bench_sink (n, value) VALUES (:n, :value)")
# the same statement as in raw_sql.py
MANY_ROWS: Final = text("INSERT INTO bench_sink (n, value) SELECT n, :value FROM unnest(CAST(:n AS bigint[])) AS n")


@handler("bench.task")
def insert(task: Task, db: GuardedSession) -> None:
    """Insert through the driver, as all other systems of the bench do."""
    with db.cursor() as cursor:
        cursor.execute(INSERT, (task.payload["n"], VALUE))


@handler("bench.sqlalchemy")
def insert_with_sqlalchemy(task: Task, db: GuardedSession) -> None:
    db.execute(ONE_ROW, {"n": task.payload["n"], "value": VALUE})


@handler("bench.hundred", batch=HUNDRED)
def insert_in_hundreds(task: Task, db: GuardedSession) -> None:
    insert(task, db)


@handler("bench.many", many=True, batch=MANY)
def insert_many(tasks: Sequence[Task], db: Session) -> None:
    db.execute(MANY_ROWS, {"n": [task.payload["n"] for task in tasks], "value": VALUE})


@handler("bench.start")
def start(task: Task, db: Session) -> None:
    started_at = time.monotonic()
    db.execute(ONE_ROW, {"n": task.payload["n"], "value": repr(started_at)})


@handler("bench.wait", concurrency=AT_ONCE // PROCESSES)
async def wait(_task: Task) -> None:
    await _client().get(slow_url())


@handler("bench.nap", concurrency=concurrency())
async def nap(task: Task) -> None:
    await asyncio.sleep(task.payload["seconds"])


@cache
def _client() -> httpx2.AsyncClient:
    return httpx2.AsyncClient(timeout=30)


@handler("bench.gate", batch=1)
def gate(_task: Task, _db: Session) -> None:
    """Wait at the gate. This is a task of its own, so that the first claim of the measured tasks is measured too."""
    pass_gate()
