"""Handlers for tests of the order of partition keys: each effect is one numbered row."""

from __future__ import annotations

from typing import Final

from sqlalchemy import TextClause, text
from sqlalchemy.orm import Session

from tasks import Finish, Task, handler

KINDS: Final = ("order.inside", "order.outside")
CREATE: Final[TextClause] = text(
    "CREATE TABLE IF NOT EXISTS public.test_order (n bigserial, task_id uuid NOT NULL, key text, seq bigint)"
)
NOTE: Final[TextClause] = text("INSERT INTO public.test_order (task_id, key, seq) VALUES (:id, :key, :seq)")


@handler(KINDS[0], batch=7, backoff=[0])
def inside(task: Task, db: Session) -> None:
    """Write the effect, then fail as often as the payload asks for."""
    db.execute(NOTE, {"id": task.id, "key": task.partition_key, "seq": task.key_seq})
    if task.payload["fails"] > task.attempt_count:
        raise RuntimeError("the payload asks for this failure")


@handler(KINDS[1], batch=4, transactional=False, backoff=[0])
def outside(task: Task) -> Finish:
    task.step("fetch", lambda: task.payload["n"])
    return Finish(lambda db: inside(task, db))
