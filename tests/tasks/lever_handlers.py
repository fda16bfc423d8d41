"""A handler that records its process and runs until a gate is open."""

from __future__ import annotations

import os
import time
from typing import Final

from sqlalchemy import TextClause, text

from models.engine import engine
from tasks import Task, handler

CREATE: Final[TextClause] = text(
    "CREATE TABLE public.lever_run (task_id uuid NOT NULL, pid integer NOT NULL);"
    "CREATE TABLE public.lever_gate (is_open boolean NOT NULL)"
)


@handler("lever.held", transactional=False, batch=1)
def hold(task: Task) -> None:
    with engine().begin() as connection:
        run = text("INSERT INTO public.lever_run (task_id, pid) VALUES (:task_id, :pid)")
        connection.execute(run, {"task_id": task.id, "pid": os.getpid()})
    while not _is_open():
        time.sleep(0.05)


def _is_open() -> bool:
    with engine().begin() as connection:
        return bool(connection.execute(text("SELECT count(*) FROM public.lever_gate")).scalar_one())
