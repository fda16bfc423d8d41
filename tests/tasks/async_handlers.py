"""Async handlers for tests with real workers: their effects commit together with SUCCEEDED."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from sqlalchemy.orm import Session

from chaos.handlers import INSERT
from tasks import Finish, Task, handler


@handler("async.effect", concurrency=100, max_attempts=50)
async def effect(task: Task) -> Finish:
    """Wait, for a file if one is named, then leave one row to the transaction that settles the task."""
    await asyncio.sleep(task.payload["seconds"])
    while "file" in task.payload and not Path(task.payload["file"]).exists():
        await asyncio.sleep(0.05)

    def write(db: Session) -> None:
        db.execute(INSERT, {"task_id": task.id})

    return Finish(write)


@handler("async.mixed", concurrency=100, max_attempts=2, soft_limit_seconds=2, backoff=[0])
async def do_what_is_asked(task: Task) -> Finish:
    """Fail, hang or wait to be cancelled in the first attempt, if the payload says so; end well in the next one."""
    does = task.payload["does"] if task.attempt_count == 0 else ""
    if does == "fails":
        raise ConnectionError("no answer")
    await asyncio.sleep(60 if does in ("hangs", "is cancelled") else task.payload["seconds"])
    while does == "waits" and not Path(task.payload["file"]).exists():
        await asyncio.sleep(0.05)
    return Finish(lambda db: db.execute(INSERT, {"task_id": task.id}))


@handler("async.hangs", concurrency=10)
async def hang(task: Task) -> None:
    """Hang in a plain function, which nothing can interrupt."""
    await task.step("hang", time.sleep, 3600)
