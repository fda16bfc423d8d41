"""What the tasks of a run do: one row each, in a table without a unique key, where what happens twice shows."""

from __future__ import annotations

import os
import time
from typing import Final

from sqlalchemy import TextClause, text
from sqlalchemy.orm import Session

from tasks import Task, handler

CREATE: Final[TextClause] = text("CREATE TABLE chaos_effect (task_id uuid NOT NULL)")
INSERT: Final[TextClause] = text("INSERT INTO chaos_effect (task_id) VALUES (:task_id)")


@handler("chaos.effect", batch=10)
def effect(task: Task, db: Session) -> None:
    """Takes a while, so that there is time to be killed in."""
    db.execute(INSERT, {"task_id": task.id})
    time.sleep(float(task.payload.get("seconds", 0)))
    if task.payload.get("ends_its_process"):
        os._exit(1)
