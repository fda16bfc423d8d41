"""A sink of each kind for the conformance suite: how a handler writes to it, and how its effects are counted."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import redis
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from models.engine import engine
from models.sql import sql
from sinks.files import Folder
from tasks.core.task import Task
from tests.servers import ServersOfTests
from tests.workflows.outside import Outside

CREATE = "CREATE TABLE IF NOT EXISTS public.effect (task_id uuid NOT NULL, n integer NOT NULL)"
INSERT = text("INSERT INTO public.effect (task_id, n) VALUES (:task_id, :n)")


def insert(db: Session, task_id: uuid.UUID, n: int = 0) -> dict[str, int]:
    """The effect: one row."""
    db.execute(INSERT, {"task_id": task_id, "n": n})
    return {"n": n}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a test offers to a place."""

    servers: ServersOfTests
    folder: Path


class Place(ABC):
    """A sink under test."""

    guarantee: ClassVar[str]
    windows: ClassVar[tuple[str, ...]]  # the failpoints that a task passes on its way
    name: ClassVar[str] = "place"

    def start(self, around: Surroundings) -> None:  # noqa: B027 - most need nothing
        """Start what the sink needs."""

    def stop(self) -> None:  # noqa: B027
        """Stop what `start` has started."""

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


class FilesPlace(Place):
    """A folder, with two files per effect. Their names differ in each attempt, so that a second effect is counted."""

    guarantee = "two_phase"
    windows = (
        "sinks.before_handles",
        "sinks.after_handles",
        "files.staged",
        "sinks.after_prepare",
        "sinks.before_decision",
        "sinks.before_commit",
        "files.renamed",
        "files.before_removal",
        "sinks.after_commit",
    )
    folder: Path

    def start(self, around: Surroundings) -> None:
        self.folder = around.folder

    @property
    def url(self) -> str:
        return self.folder.as_uri()

    def write(self, task: Task, n: int = 0) -> Any:
        def write_two(folder: Folder) -> None:
            name = f"{task.id}/{n} {uuid.uuid4()}"
            folder.write(f"{name}.json", {"n": n})
            folder.write(f"{name}.txt", str(n))

        return task.sink(self.name).run(write_two)

    def count(self, task_id: uuid.UUID) -> int:
        found = [{path.stem for path in self.folder.glob(f"{task_id}/*.{suffix}")} for suffix in ("json", "txt")]
        assert found[0] == found[1], "half of an effect is visible"
        return len(found[0])

    def left_behind(self) -> list[str]:
        return sorted(path.name for path in (self.folder / ".celeriac").iterdir() if path.name != "id")


class RedisPlace(Place):
    """A list of the receipt Redis."""

    guarantee = "keyed"
    windows = ("redis_list.before_script", "redis_list.after_script")
    list_name = "effects of {tests}"

    def start(self, around: Surroundings) -> None:
        self.address = around.servers.addresses["REDIS_URL"]
        self.client = redis.Redis.from_url(self.address, decode_responses=True)

    def stop(self) -> None:
        self.client.close()

    @property
    def url(self) -> str:
        return self.address

    def write(self, task: Task, n: int = 0) -> Any:
        return task.sink(self.name).append(self.list_name, {"task": str(task.id), "n": n}, step=f"write {n}")

    def count(self, task_id: uuid.UUID) -> int:
        entries = map(json.loads, self.client.lrange(self.list_name, 0, -1))
        return sum(entry["task"] == str(task_id) for entry in entries)

    def left_behind(self) -> list[str]:
        """Return keys of ours that would never expire."""
        return [str(key) for key in self.client.keys("celeriac:*") if self.client.ttl(key) < 0]


class HttpPlace(Place):
    """A service that performs one effect per Idempotency-Key."""

    guarantee = "keyed"
    windows = ("http.before_post", "http.after_post", "steps.before_keep", "steps.after_keep", "http.after_keep")

    def start(self, _around: Surroundings) -> None:
        self.service = Outside()

    def stop(self) -> None:
        self.service.end()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service.port}/charge?allow_private=1&allow_http=1&secret=hunter2"

    def write(self, task: Task, n: int = 0) -> Any:
        return task.sink(self.name).post({"task": str(task.id), "n": n}, step=f"write {n}")

    def count(self, task_id: uuid.UUID) -> int:
        return sum(effect["asked"]["task"] == str(task_id) for effect in self.service.effects.values())


Make = Callable[[Engine], Place]
PLACES: dict[str, Make] = {
    "atomic": lambda _: LedgerPlace(),
    "outbox": lambda _: OutboxPlace(),
    "keyed PostgreSQL": KeyedPlace,
    "two-phase PostgreSQL": TwoPhasePlace,
    "files": lambda _: FilesPlace(),
    "Redis list": lambda _: RedisPlace(),
    "HTTP": lambda _: HttpPlace(),
}
