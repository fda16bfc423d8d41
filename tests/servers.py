"""The servers of a test run: their addresses, databases, and how to empty them."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import redis
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.exc import OperationalError

from child_process import ChildProcess
from embedded.home import Home
from models.engine import make_engine
from models.schema import migrate
from models.sql import sql
from models.tables import Base

DEADLOCK = "40P01"
LARGE_TABLE = 256 * 1024  # bytes
_numbers = itertools.count()


class Server(Protocol):
    """A PostgreSQL server, embedded or external."""

    def url(self, *, superuser: bool = False, database: str = ...) -> str: ...

    def create_database(self, name: str = ...) -> None: ...


class GivenServer:
    """The PostgreSQL of TEST_DATABASE_URL (a superuser). The tests create a role and databases of their own."""

    role = "celeriac_tests"

    def __init__(self, url: str) -> None:
        self.address = make_url(url)
        self.password = secrets.token_urlsafe(16)

    def url(self, *, superuser: bool = False, database: str = "postgres") -> str:
        address = self.address.set(drivername="postgresql", database=database)
        if not superuser:
            address = address.set(username=self.role, password=self.password)
        return address.render_as_string(hide_password=False)

    def create_database(self, name: str = "celeriac_tests") -> None:
        admin = create_engine(Cluster.sqlalchemy(self.url(superuser=True)), isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            known = connection.execute(text("SELECT 1 FROM pg_roles WHERE rolname = :r"), {"r": self.role}).scalar()
            verb = "ALTER" if known else "CREATE"
            connection.execute(text(f"{verb} ROLE {self.role} LOGIN PASSWORD '{self.password}'"))
            connection.execute(text(f"GRANT pg_read_all_stats TO {self.role}"))
            connection.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
            connection.execute(text(f"CREATE DATABASE {name} OWNER {self.role}"))
        admin.dispose()


class Cluster:
    """Creates databases on one PostgreSQL server and knows their addresses."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def url(self, database: str) -> str:
        return self.sqlalchemy(self.server.url(database=database))

    def superuser_url(self, database: str) -> str:
        return self.sqlalchemy(self.server.url(superuser=True, database=database))

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
        """Create a database at head, once, and return its name."""
        name = "migrated"
        self.server.create_database(name)
        with self.admin.connect() as connection:  # so that a statement of ours without its schema fails
            connection.execute(text(f"ALTER DATABASE {name} SET search_path = ''"))
        engine = make_engine(self.url(name))
        migrate(engine)
        engine.dispose()
        return name

    @cached_property
    def superuser(self) -> Engine:
        """An engine for the migrated database as superuser, who may move the clock."""
        return create_engine(self.superuser_url(self.migrated), pool_size=2)

    @staticmethod
    def sqlalchemy(url: str) -> str:
        return url.replace("postgresql://", "postgresql+psycopg2://", 1)


@dataclass
class ServersOfTests:
    """The servers that all tests share."""

    home: Home
    running: dict[str, ChildProcess]
    addresses: dict[str, str]
    cluster: Cluster

    def flush_redis(self) -> None:
        for client in self._clients:
            client.flushall()

    @cached_property
    def _clients(self) -> list[redis.Redis]:
        return [redis.Redis.from_url(self.addresses[variable]) for variable in ("BROKER_URL", "REDIS_URL")]


# A test that failed may have left a transaction open, whose locks we would wait for.
END_LEFT_TRANSACTIONS = text("""
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'
""")


# Wait for a thread of an earlier test that still writes, so that its rows are deleted, too.
WAIT_FOR_WRITERS = sql(f"LOCK TABLE {', '.join(Base.metadata.tables)} IN SHARE ROW EXCLUSIVE MODE")
FILLED = sql(
    " UNION ALL ".join(
        f"(SELECT '{name}', pg_relation_size('{name}') WHERE EXISTS (SELECT FROM {name}))"
        for name in Base.metadata.tables
    )
)
RESTART = text("""
    SELECT setval(CAST(format('%I.%I', schemaname, sequencename) AS regclass), 1, false) FROM pg_sequences
    WHERE schemaname = 'celeriac' AND last_value IS NOT NULL
""")


def empty_tables(cluster: Cluster) -> None:
    """Empty all tables. A thread of an earlier test may still write, so a deadlock is tried again.

    TRUNCATE creates new files for a table and its indexes, and every connection must plan its statements again, which
    takes longer than most tests. So small tables are emptied with DELETE, until their dead rows have made them large.
    """
    for is_last in (False, False, True):
        try:
            with cluster.superuser.begin() as connection:
                _empty(connection)
        except OperationalError as error:
            if is_last or getattr(error.orig, "pgcode", None) != DEADLOCK:
                raise
        else:
            return


def _empty(connection: Connection) -> None:
    connection.execute(text("SET LOCAL lock_timeout = '10s'"))
    connection.execute(text("SET LOCAL session_replication_role = replica"))  # no triggers: the order does not matter
    connection.execute(END_LEFT_TRANSACTIONS)
    connection.execute(WAIT_FOR_WRITERS)
    filled = connection.execute(FILLED).all()
    if large := [name for name, size in filled if size > LARGE_TABLE]:
        connection.execute(text(f"TRUNCATE {', '.join(large)} CASCADE"))
    if small := [name for name, size in filled if size <= LARGE_TABLE]:
        connection.execute(text("; ".join(f"DELETE FROM {name}" for name in small)))
    connection.execute(RESTART)


def wait_until(condition: Callable[[], object], what: str, *, seconds: float = 30) -> None:
    """Wait until the condition is true, or fail with a sentence that says what did not happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)
