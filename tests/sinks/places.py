"""A sink of each kind for the conformance suite: how a handler writes to it, and how its effects are counted."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from models.engine import engine
from models.sql import sql
from tasks.core.task import Task

CREATE = "CREATE TABLE IF NOT EXISTS public.effect (task_id uuid NOT NULL, n integer NOT NULL)"
INSERT = text("INSERT INTO public.effect (task_id, n) VALUES (:task_id, :n)")


def insert(db: Session, task_id: uuid.UUID, n: int = 0) -> dict[str, int]:
    """The effect: one row."""
    db.execute(INSERT, {"task_id": task_id, "n": n})
    return {"n": n}


class Place(ABC):
    """A sink under test."""

    guarantee: ClassVar[str]
    windows: ClassVar[tuple[str, ...]]  # the failpoints that a task passes on its way
    name: ClassVar[str] = "place"

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def write(self, task: Task, n: int = 0) -> Any:
        """Write the effect, as a handler does."""

    @abstractmethod
    def count(self, task_id: uuid.UUID) -> int:
        """Return how many effects of this task are visible."""

    def left_behind(self) -> list[str]:
        """Return prepared transactions, locks and files that should not be there any more."""
        return []

    @property
    def setting(self) -> dict[str, Any]:
        return {"url": self.url, "guarantee": self.guarantee}


class OtherPostgres(Place):
    """Another database, with one row per effect."""

    def __init__(self, other: Engine) -> None:
        self.other = other

    @property
    def url(self) -> str:
        return self.other.url.render_as_string(hide_password=False)

    def write(self, task: Task, n: int = 0) -> Any:
        return task.sink(self.name).run(insert, task.id, n, step=f"write {n}")

    def count(self, task_id: uuid.UUID) -> int:
        with self.other.begin() as connection:
            counted = text("SELECT count(*) FROM public.effect WHERE task_id = :id")
            return int(connection.execute(counted, {"id": task_id}).scalar_one())

    def left_behind(self) -> list[str]:
        with self.other.begin() as connection:
            prepared = list(connection.scalars(text("SELECT gid FROM pg_prepared_xacts WHERE database = 'sink'")))
            locks = connection.scalars(
                text("""
                    SELECT mode || ' by ' || pid FROM pg_locks
                    WHERE relation = CAST('public.effect' AS regclass) AND pid <> pg_backend_pid()
                """)
            )
            return prepared + list(locks)


class KeyedPlace(OtherPostgres):
    guarantee = "keyed"
    windows = ("keyed.before_effect", "keyed.before_commit", "keyed.after_commit")


class TwoPhasePlace(OtherPostgres):
    guarantee = "two_phase"
    windows = (
        "sinks.before_handles",
        "sinks.after_handles",
        "two_phase.prepared",
        "sinks.after_prepare",
        "sinks.before_decision",
        "sinks.before_commit",
        "sinks.after_commit",
    )


class LedgerPlace(Place):
    """The ledger's own database."""

    guarantee = "atomic"
    windows = ("ingest.after_effect", "ingest.after_settle")
    url = "ledger:"

    def write(self, task: Task, n: int = 0) -> Any:
        return task.sink(self.name).run(insert, task.id, n)

    def count(self, task_id: uuid.UUID) -> int:
        with engine().begin() as connection:
            counted = sql("SELECT count(*) FROM public.effect WHERE task_id = :id")
            return int(connection.execute(counted, {"id": task_id}).scalar_one())


class OutboxPlace(LedgerPlace):
    """Events of the outbox: the event exists once."""

    guarantee = "at_least_once"
    url = "outbox:nowhere"

    def write(self, task: Task, n: int = 0) -> Any:
        return task.sink(self.name).add({"task": str(task.id), "n": n})

    def count(self, task_id: uuid.UUID) -> int:
        counted = sql("SELECT count(*) FROM ledger.outbox_event WHERE payload ->> 'task' = CAST(:id AS text)")
        with engine().begin() as connection:
            return int(connection.execute(counted, {"id": task_id}).scalar_one())


Make = Callable[[Engine], Place]
PLACES: dict[str, Make] = {
    "atomic": lambda _: LedgerPlace(),
    "outbox": lambda _: OutboxPlace(),
    "keyed PostgreSQL": KeyedPlace,
    "two-phase PostgreSQL": TwoPhasePlace,
}
