"""An async handler for tests with real workers: it waits, and its effect commits together with SUCCEEDED."""

from __future__ import annotations

import asyncio
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
