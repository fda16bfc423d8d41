"""Handlers of the tests, a table that counts their effects, and queries for tasks and wake-ups."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from models.engine import engine
from models.sql import sql
from tasks.core.registry import handler
from tasks.core.task import Task

Script = Callable[[Task, Session], Any]
SCRIPTS: dict[str, Script] = {}  # what "test.scripted" does, by payload["do"]
INTO_SINK = sql("INSERT INTO public.test_sink (task_id, note) VALUES (:task_id, :note)")
MANY_BATCH = 50


class OnPurpose(Exception):
    """Raised by "test.fail"."""


@dataclass(frozen=True, slots=True)
class Wakeup:
    """A wake-up in the outbox."""

    id: int
    queue: str
    type: str
    ids: list[uuid.UUID]
    batch: int
    priority: int
    due_at: datetime | None  # None: it was due when it was inserted
    status: str
    is_leased: bool


def register() -> None:
    """Register the handlers of the tests in this process. Calling it again changes nothing."""
    handler("test.insert")(insert)
    handler("test.fail")(fail)
    handler("test.many", many=True, batch=MANY_BATCH)(insert_many)
    handler("test.scripted")(scripted)


def insert(task: Task, db: Session) -> None:
    """Insert one row into the sink."""
    db.execute(INTO_SINK, {"task_id": task.id, "note": task.type})


def fail(task: Task, db: Session) -> None:
    """Insert one row into the sink, and then raise OnPurpose."""
    insert(task, db)
    raise OnPurpose("on purpose")


def insert_many(tasks: Sequence[Task], db: Session) -> None:
    db.execute(INTO_SINK, [{"task_id": task.id, "note": task.type} for task in tasks])


def scripted(task: Task, db: Session) -> Any:
    return SCRIPTS[task.payload["do"]](task, db)


def sink() -> None:
    """Create the table `test_sink`, or empty it. It has no unique key, so an effect that happens twice has two rows."""
    with engine().begin() as connection:
        connection.execute(
            sql("CREATE TABLE IF NOT EXISTS public.test_sink (task_id uuid, note text, number bigserial)")
        )
        connection.execute(sql("DELETE FROM public.test_sink"))  # faster than TRUNCATE


def effects() -> Counter[uuid.UUID]:
    """Return the number of effects of each task."""
    with engine().begin() as connection:
        return Counter(connection.execute(sql("SELECT task_id FROM public.test_sink")).scalars())


def rows(columns: str = "status, attempt_count", where: str = "true", **values: Any) -> list[tuple[Any, ...]]:
    """Return columns of tasks, in the order of their submission."""
    statement = sql(f"SELECT {columns} FROM ledger.ingest_task WHERE {where} ORDER BY created_at, id")
    with engine().begin() as connection:
        return [tuple(row) for row in connection.execute(statement, values)]


def task(task_id: uuid.UUID) -> dict[str, Any]:
    """Return one task by column."""
    with engine().begin() as connection:
        found = connection.execute(sql("SELECT * FROM ledger.ingest_task WHERE id = :id"), {"id": task_id})
        return dict(found.mappings().one())


def transitions(task_id: uuid.UUID, columns: str = "from_status, to_status") -> list[tuple[Any, ...]]:
    """Return the history of one task, oldest first."""
    statement = sql(f"SELECT {columns} FROM ledger.ingest_task_transition WHERE task_id = :id ORDER BY id")
    with engine().begin() as connection:
        return [tuple(row) for row in connection.execute(statement, {"id": task_id})]


def wakeups(where: str = "true") -> list[Wakeup]:
    """Return every wake-up in the outbox, sent or not, oldest first."""
    statement = sql(f"""
        SELECT id, destination, payload, headers, next_retry_at, status, lease_token IS NOT NULL
        FROM ledger.outbox_event
        WHERE destination LIKE 'celery:%' AND payload ? 'ids' AND {where} ORDER BY id""")
    found = []
    with engine().begin() as connection:
        for id_, destination, payload, headers, due_at, status, is_leased in connection.execute(statement):
            ids = [uuid.UUID(one) for one in payload["ids"]]
            queue = destination.removeprefix("celery:")
            batch, priority = payload["batch"], headers["priority"]
            found.append(Wakeup(id_, queue, payload["type"], ids, batch, priority, due_at, status, is_leased))
    return found
