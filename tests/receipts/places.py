"""A sink of each kind that takes part in checkpoints: how a handler writes to it, and which effects are visible."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import redis
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from models.engine import engine
from receipts.streams.entries import Batch
from tests.servers import ServersOfTests

CREATE = "CREATE TABLE IF NOT EXISTS public.stream_effect (place bigint GENERATED ALWAYS AS IDENTITY, n integer)"
EMPTY = "TRUNCATE public.stream_effect"
INSERT = text("INSERT INTO public.stream_effect (n) VALUES (:n)")
SEEN = text("SELECT n FROM public.stream_effect ORDER BY place")
PREPARED = text("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
LOCKS = text("""
    SELECT mode FROM pg_locks WHERE relation = CAST('public.stream_effect' AS regclass) AND pid <> pg_backend_pid()
""")
STREAM = "orders"
# every consumer passes these
WINDOWS = (
    "stream.after_read",
    "stream.after_handler",
    "checkpoint.before_row",
    "checkpoint.before_commit_of_row",
    "checkpoint.after_row",
    "checkpoint.after_sink",
    "checkpoint.before_mark",
    "checkpoint.before_ack",
    "checkpoint.after_ack",
)


def insert(db: Session, n: int) -> None:
    db.execute(INSERT, {"n": n})


class StreamPlace(ABC):
    """A sink under test. The effect of an entry is its number `n`."""

    guarantee: ClassVar[str]
    windows: ClassVar[tuple[str, ...]] = ()  # failpoints of its own
    name: ClassVar[str] = "place"

    def __init__(self, servers: ServersOfTests, other: Engine, folder: Path) -> None:
        self.redis_url = servers.addresses["REDIS_URL"]
        self.client: Any = redis.Redis.from_url(self.redis_url, decode_responses=True)
        self.other = other
        self.folder = folder

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def handle(self, batch: Batch) -> None:
        """Write the effect of each entry."""

    @abstractmethod
    def seen(self) -> list[int]:
        """Return the visible effects, in their order if the sink has one."""

    def left_behind(self) -> list[str]:
        """Return what should not be there any more."""
        return []

    @property
    def setting(self) -> dict[str, Any]:
        return {"url": self.url, "guarantee": self.guarantee}


class Database(StreamPlace):
    """A table; each effect is a row."""

    def handle(self, batch: Batch) -> None:
        for entry in batch.entries:
            batch.sink(self.name).run(insert, int(entry.fields["n"]))

    @property
    @abstractmethod
    def engine(self) -> Engine: ...

    def seen(self) -> list[int]:
        with self.engine.begin() as connection:
            return list(connection.scalars(SEEN))

    def left_behind(self) -> list[str]:
        with self.engine.begin() as connection:
            return [*connection.scalars(PREPARED), *connection.scalars(LOCKS)]


class Ledger(Database):
    guarantee = "atomic"
    url = "ledger:"

    @property
    def engine(self) -> Engine:
        return engine()


class TwoPhasePostgres(Database):
    guarantee = "two_phase"
    windows = (
        "checkpoint.before_handle",
        "checkpoint.after_handle",
        "two_phase.prepared",
        "checkpoint.after_prepare",
    )

    @property
    def url(self) -> str:
        return self.other.url.render_as_string(hide_password=False)

    @property
    def engine(self) -> Engine:
        return self.other


class Outbox(StreamPlace):
    """Events of the outbox, each of which exists once."""

    guarantee = "at_least_once"
    url = "outbox:nowhere"

    def handle(self, batch: Batch) -> None:
        for entry in batch.entries:
            batch.sink(self.name).add({"n": int(entry.fields["n"])})

    def seen(self) -> list[int]:
        with engine().begin() as connection:
            events = connection.scalars(text("SELECT payload ->> 'n' FROM celeriac.outbox_event ORDER BY id"))
            return list(map(int, events))


class Files(StreamPlace):
    """A folder. The names of files differ in each attempt, so that a second effect is counted."""

    guarantee = "two_phase"
    windows = ("checkpoint.after_handle", "files.staged", "checkpoint.after_prepare", "files.renamed")

    @property
    def url(self) -> str:
        return self.folder.as_uri()

    def handle(self, batch: Batch) -> None:
        for entry in batch.entries:
            batch.sink(self.name).run(lambda folder, n=entry.fields["n"]: folder.write(f"{n} {uuid.uuid4()}", n))

    def seen(self) -> list[int]:
        return sorted(int(path.name.partition(" ")[0]) for path in self.folder.glob("* *"))

    def left_behind(self) -> list[str]:
        return sorted(path.name for path in (self.folder / ".celeriac").iterdir() if path.name != "id")


class RedisList(StreamPlace):
    """A list in any Redis."""

    guarantee = "keyed"
    windows = ("redis_list.before_script", "redis_list.after_script")
    list_name = "effects"

    @property
    def url(self) -> str:
        return self.redis_url

    def handle(self, batch: Batch) -> None:
        for entry in batch.entries:
            batch.sink(self.name).append(entry, self.list_name, int(entry.fields["n"]))

    def seen(self) -> list[int]:
        return [json.loads(value) for value in self.client.lrange(self.list_name, 0, -1)]


class Script(RedisList):
    """A list in the Redis of the stream, written by the script that acknowledges."""

    guarantee = "script"
    windows = ("script.before", "script.after")
    list_name = f"{{{STREAM}}}:effects"


PLACES: dict[str, Callable[[ServersOfTests, Engine, Path], StreamPlace]] = {
    "atomic": Ledger,
    "outbox": Outbox,
    "two-phase PostgreSQL": TwoPhasePostgres,
    "files": Files,
    "Redis list": RedisList,
    "Redis script": Script,
}
