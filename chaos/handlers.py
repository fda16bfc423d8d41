"""The handler of the demo: inserts one row per task into a table without a unique key, so that duplicates show."""

from __future__ import annotations

import os
import time
from typing import Final

from sqlalchemy import TextClause, text
from sqlalchemy.orm import Session

from tasks import Task, handler

CREATE: Final[TextClause] = text("CREATE TABLE public.chaos_effect (task_id uuid NOT NULL)")
INSERT: Final[TextClause] = text("INSERT INTO public.chaos_effect (task_id) VALUES (:task_id)")


@handler("chaos.effect", batch=10)
def effect(task: Task, db: Session) -> None:
    """Insert a row, then sleep, so that the worker can be killed in the middle."""
    db.execute(INSERT, {"task_id": task.id})
    time.sleep(float(task.payload.get("seconds", 0)))
    if task.payload.get("ends_its_process"):
        os._exit(1)
