"""Handlers for workers of every pool: they hang, wait, have limits, or never let another thread run."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from typing import Final

from sqlalchemy import TextClause, text
from sqlalchemy.orm import Session

from models.engine import engine
from models.errors import LeaseLost
from models.sql import sql
from tasks import Task, handler

CREATE: Final[TextClause] = text("CREATE TABLE public.pool_effect (task_id uuid NOT NULL)")
RUNNING: Final[TextClause] = sql("""
    SELECT count(*) FROM ledger.ingest_task WHERE type = :type AND payload ->> 'tenant' = :tenant AND status = 'RUNNING'
""")
THREADS: Final = 50
MEET_SECONDS: Final = 60.0
INSERT: Final[TextClause] = text("INSERT INTO public.pool_effect (task_id) VALUES (:task_id)")


@handler("pool.effect", batch=1)
def effect(task: Task, db: Session) -> None:
    """Insert a row, then wait in short sleeps, so that an exception can be raised in between."""
    db.execute(INSERT, {"task_id": task.id})
    _wait(task)


@handler("pool.meets", batch=1)
def meet(task: Task, db: Session) -> None:
    """Insert a row, then wait until fifty tasks have done so; fail if they do not come."""
    db.execute(INSERT, {"task_id": task.id})
    _all_threads.wait(MEET_SECONDS)


@handler("pool.outside", transactional=False, batch=1)
def outside(task: Task) -> None:
    """Insert a row only when the task is lost."""
    try:
        _wait(task)
    except LeaseLost:
        with engine().begin() as connection:
            connection.execute(INSERT, {"task_id": task.id})
        raise


@handler("pool.soft_limit", batch=1, soft_limit_seconds=0.5, hard_limit_seconds=60, backoff=[0])
def soft_limit(task: Task, db: Session) -> None:
    """Exceed the soft limit, but only with the first attempt."""
    db.execute(INSERT, {"task_id": task.id})
    if task.attempt_count == 0:
        _wait(task)


@handler("pool.hangs", batch=1, transactional=False, soft_limit_seconds=0.5, hard_limit_seconds=1, max_attempts=1)
def hang(_task: Task) -> None:
    """Wait in one long system call."""
    time.sleep(600)


@handler("pool.hangs_for_long", batch=1, transactional=False)
def hang_for_long(_task: Task) -> None:
    time.sleep(600)


@handler("pool.holds_the_gil", batch=1, soft_limit_seconds=0.5, hard_limit_seconds=1, max_attempts=1)
def hold_the_gil(_task: Task, _db: Session) -> None:
    """Run in C for ever, without a look at signals or other threads."""
    deque(itertools.repeat(None), maxlen=0)


@handler("pool.limited", transactional=False, max_running=2, limit_by="tenant")
def limited(task: Task) -> None:
    """Wait until another task of the same tenant runs, if the payload says so."""
    values = {"type": task.type, "tenant": task.payload["tenant"]}
    while task.payload["meets"]:
        with engine().connect() as connection:
            if connection.execute(RUNNING, values).scalar_one() > 1:
                break
        time.sleep(0.01)


@handler("pool.rated", transactional=False, rate="1/d")
def rated(_task: Task) -> None:
    """One task starts; the others wait until tomorrow."""


_all_threads = threading.Barrier(THREADS)


def _wait(task: Task) -> None:
    until = time.monotonic() + float((task.payload or {}).get("seconds", 0))
    while time.monotonic() < until:
        time.sleep(0.02)
