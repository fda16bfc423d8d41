"""A sink of every kind on temporary servers: how a handler writes to it, and how its effects are counted there.

Effects have no unique key of their own, so an effect that happens twice is counted twice.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import redis
from sqlalchemy import Engine, NullPool, create_engine, make_url, text
from sqlalchemy.orm import Session

from chaos.http_endpoint import HttpEndpoint
from embedded.postgres import Postgres
from embedded.temporary_servers import TemporaryServers
from models.sql import sql
from sinks.files import STAGING, Folder
from tasks import Task

CREATE: Final = text("CREATE TABLE IF NOT EXISTS public.chaos_effect (task_id uuid NOT NULL)")
INSERT: Final = text("INSERT INTO public.chaos_effect (task_id) VALUES (:task_id)")
COUNT: Final = text("SELECT task_id, count(*) FROM public.chaos_effect GROUP BY task_id")
PREPARED: Final = text("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
# A backend whose process was killed ends by itself, but it needs a moment to notice.
LOCKS: Final = text("""
    SELECT DISTINCT format('%s lock on %s', mode, relation::regclass) FROM pg_locks
    WHERE database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND relation IN (SELECT oid FROM pg_class WHERE relname IN ('chaos_effect', 'effect'))
      AND pid IS DISTINCT FROM pg_backend_pid()
""")
EVENTS: Final = sql("""
    SELECT CAST(payload ->> 'chaos' AS uuid), count(*) FROM ledger.outbox_event WHERE payload ? 'chaos' GROUP BY 1
""")
EFFECTS: Final = "effects of {chaos}"  # the name of a list in Redis


def insert(db: Session, task_id: uuid.UUID) -> None:
    """The effect in a database: one row."""
    db.execute(INSERT, {"task_id": task_id})


class Place(ABC):
    """A sink, and the place behind it."""

    guarantee: ClassVar[str]

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url

    @property
    def setting(self) -> dict[str, str]:
        return {"url": self.url, "guarantee": self.guarantee}

    @abstractmethod
    def write(self, task: Task) -> None:
        """Write one effect, as a handler does."""

    @abstractmethod
    def effects(self) -> Counter[uuid.UUID]:
        """Return the number of effects of each task."""

    def left_behind(self) -> list[str]:
        """Return the prepared transactions, locks and files that are still there."""
        return []


class Database(Place):
    """A table in a database. The address of the sink may differ: the ledger's own database has none."""

    def __init__(self, name: str, address: str, *, url: str = "") -> None:
        super().__init__(name, url or address)
        # No pool: a forked child must not inherit a connection.
        self.engine: Engine = create_engine(address, poolclass=NullPool)
        with self.engine.begin() as connection:
            connection.execute(CREATE)

    def write(self, task: Task) -> None:
        task.sink(self.name).run(insert, task.id)

    def effects(self) -> Counter[uuid.UUID]:
        with self.engine.begin() as connection:
            return _counter(connection.execute(COUNT))

    def left_behind(self) -> list[str]:
        with self.engine.begin() as connection:
            prepared = [f"the prepared transaction {gid}" for gid in connection.scalars(PREPARED)]
            return prepared + list(connection.scalars(LOCKS))


class AtomicDatabase(Database):
    guarantee = "atomic"


class KeyedDatabase(Database):
    guarantee = "keyed"


class TwoPhaseDatabase(Database):
    guarantee = "two_phase"


class Outbox(Database):
    """Events of the outbox: each exists once. Its destination is not asked."""

    guarantee = "at_least_once"

    def write(self, task: Task) -> None:
        task.sink(self.name).add({"chaos": str(task.id)})

    def effects(self) -> Counter[uuid.UUID]:
        with self.engine.begin() as connection:
            return _counter(connection.execute(EVENTS))


class RedisList(Place):
    guarantee = "keyed"

    def write(self, task: Task) -> None:
        task.sink(self.name).append(EFFECTS, str(task.id))

    def effects(self) -> Counter[uuid.UUID]:
        with redis.Redis.from_url(self.url, decode_responses=True) as client:
            entries: Any = client.lrange(EFFECTS, 0, -1)
        return Counter(uuid.UUID(json.loads(entry)) for entry in entries)


class Files(Place):
    """Two files per effect, whose names differ in each attempt; half an effect counts as none."""

    guarantee = "two_phase"

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder.as_uri())
        self.folder = folder

    def write(self, task: Task) -> None:
        def write_two(folder: Folder) -> None:
            name = f"{task.id} {uuid.uuid4().hex}"
            folder.write(f"{name}.json", {"task": str(task.id)})
            folder.write(f"{name}.txt", str(task.id))

        task.sink(self.name).run(write_two)

    def effects(self) -> Counter[uuid.UUID]:
        json_files, texts = self._stems()
        return Counter(uuid.UUID(stem.partition(" ")[0]) for stem in json_files & texts)

    def left_behind(self) -> list[str]:
        staged = [f"the staged folder {path.name}" for path in (self.folder / STAGING).iterdir() if path.name != "id"]
        json_files, texts = self._stems()
        return staged + [f"half of the files {stem}" for stem in json_files ^ texts]

    def _stems(self) -> tuple[set[str], set[str]]:
        """Return the names of the files of each kind, without their suffix."""
        json_files, texts = ({path.stem for path in self.folder.glob(f"*.{suffix}")} for suffix in ("json", "txt"))
        return json_files, texts


class Http(Place):
    """A service that remembers keys."""

    guarantee = "keyed"

    def __init__(self, name: str, endpoint: HttpEndpoint) -> None:
        super().__init__(name, f"{endpoint.url}?allow_private=1&allow_http=1")
        self.endpoint = endpoint

    def write(self, task: Task) -> None:
        task.sink(self.name).post(str(task.id))

    def effects(self) -> Counter[uuid.UUID]:
        return Counter(map(uuid.UUID, self.endpoint.effects()))


def _counter(rows: Iterable[Any]) -> Counter[uuid.UUID]:
    return Counter({row[0]: row[1] for row in rows})


# What the tasks of each kind write to. A pair has two databases that commit together.
KINDS: Final = {
    "atomic": ("atomic",),
    "outbox": ("outbox",),
    "keyed": ("keyed",),
    "two_phase": ("first",),
    "pair": ("first", "second"),
    "redis": ("redis",),
    "files": ("files",),
    "http": ("http",),
}


@contextmanager
def open_places(servers: TemporaryServers) -> Iterator[dict[str, Place]]:
    """Create databases, a folder and a service for all sinks; return the places by the names of their sinks."""
    ledger = make_url(servers.variables["DATABASE_URL"])
    address = ledger.render_as_string(hide_password=False)
    postgres = Postgres(servers.home, ledger.port or 0)
    for name in ("keyed", "first", "second"):
        postgres.create_database(f"chaos_{name}")

    def database(name: str) -> str:
        return ledger.set(database=f"chaos_{name}").render_as_string(hide_password=False)

    folder = servers.home.path / "chaos-files"
    folder.mkdir()
    with ExitStack() as stack:
        endpoint = stack.enter_context(HttpEndpoint())
        yield {
            place.name: place
            for place in (
                AtomicDatabase("atomic", address, url="ledger:"),
                Outbox("outbox", address, url="outbox:nowhere"),
                KeyedDatabase("keyed", database("keyed")),
                TwoPhaseDatabase("first", database("first")),
                TwoPhaseDatabase("second", database("second")),
                RedisList("redis", servers.addresses["REDIS_URL"]),
                Files("files", folder),
                Http("http", endpoint),
            )
        }
