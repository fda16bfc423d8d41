"""A handler that runs every second, for real workers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tasks import Task, handler
from tests.tasks.work import insert


@handler("test.every_second", every=timedelta(seconds=1), catch_up="all")
def every_second(task: Task, db: Any) -> None:
    insert(task, db)
