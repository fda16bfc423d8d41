"""What tests need to know of the servers they started."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import redis
from sqlalchemy import Engine, create_engine, text

from embedded.home import Home
from embedded.part import Running
from embedded.postgres import Postgres
from models import Base, make_engine, migrate

_numbers = itertools.count()


class Cluster:
    """One PostgreSQL: makes databases, knows their addresses."""

    def __init__(self, server: Postgres) -> None:
        self.server = server

    def url(self, database: str) -> str:
        return self._sqlalchemy(self.server.url(database=database))

    def superuser_url(self, database: str) -> str:
        return self._sqlalchemy(self.server.url(superuser=True, database=database))

    @contextmanager
    def temporary_database(self) -> Iterator[str]:
        name = f"test_{next(_numbers)}"
        self.server.create_database(name)
        try:
            yield name
        finally:
            with self.admin.connect() as connection:
                connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))

    @cached_property
    def admin(self) -> Engine:
        return create_engine(self.superuser_url("postgres"), isolation_level="AUTOCOMMIT")

    @cached_property
    def migrated(self) -> str:
        """The name of a database at head, made once."""
        name = "migrated"
        self.server.create_database(name)
        engine = make_engine(self.url(name))
        migrate(engine)
        engine.dispose()
        return name

    @cached_property
    def superuser(self) -> Engine:
        """A superuser's connection to the migrated database: it may move the clock."""
        return create_engine(self.superuser_url(self.migrated), pool_size=2)

    @staticmethod
    def _sqlalchemy(url: str) -> str:
        return url.replace("postgresql://", "postgresql+psycopg2://", 1)


@dataclass
class ServersOfTests:
    """The session's servers."""

    home: Home
    running: dict[str, Running]
    addresses: dict[str, str]
    cluster: Cluster

    def flush_redis(self) -> None:
        for variable in ("BROKER_URL", "REDIS_URL"):
            with redis.Redis.from_url(self.addresses[variable]) as client:
                client.flushall()


def truncate_everything(cluster: Cluster) -> None:
    tables = ", ".join(Base.metadata.tables)
    with cluster.superuser.begin() as connection:
        connection.execute(text(f"TRUNCATE {tables} RESTART IDENTITY"))


def wait_until(condition: Callable[[], object], what: str, *, seconds: float = 30) -> None:
    """Wait for something that must come true; a test that waits in vain says for what."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)
