"""The stack for users' tests: real servers, with the test process or a real worker process as the worker."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import redis
from kombu import Connection as Broker
from sqlalchemy import URL, Engine, NullPool, create_engine, make_url, text

import settings
from child_process import ChildProcess
from embedded.postgres import Postgres
from embedded.program import Program
from embedded.temporary_servers import TemporaryServers
from models.engine import engine
from models.errors import Misuse
from models.sql import sql
from models.tables import Base
from outbox.after_commit_publisher import after_commit_publisher
from settings import ROOT
from sinks.configuration import open_sinks
from tasks.execution.deliver import deliver
from tasks.testing.clock import MOVE
from tasks.ticks import relay_of_this_process

MOST_MESSAGES: Final = 100_000
PATIENCE_SECONDS: Final = 10.0
# A test that failed may have left a transaction open, whose locks would block the TRUNCATE.
END_LEFT_TRANSACTIONS: Final = text("""
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'
""")


class StackForTests:
    """PostgreSQL, the broker and the receipt Redis of a test run. Create and empty your own tables yourself."""

    def __init__(self, servers: TemporaryServers) -> None:
        self.servers = servers
        self.superuser = create_engine(servers.superuser_url)

    @property
    def engine(self) -> Engine:
        """Return the engine of this process, the same that `models.engine.engine()` returns."""
        return engine()

    def empty(self) -> None:
        """Delete all tasks, events and messages, and reset the clock."""
        after_commit_publisher().wait_until_idle(PATIENCE_SECONDS)  # it locks the tables in another order
        with self.superuser.begin() as connection:
            connection.execute(END_LEFT_TRANSACTIONS)
            connection.execute(sql(f"TRUNCATE {', '.join(Base.metadata.tables)} RESTART IDENTITY"))
        for variable in ("BROKER_URL", "REDIS_URL"):
            with redis.Redis.from_url(self.servers.addresses[variable]) as client:
                client.flushall()

    def travel(self, by: timedelta | None = None, **how_far: Any) -> None:
        """Move the ledger's clock forward, for all processes, until the next test."""
        with self.superuser.begin() as connection:
            connection.execute(MOVE, {"by": by if by is not None else timedelta(**how_far)})

    def database(self, name: str) -> Engine:
        """Create another empty database on the same server, for a sink, and return an engine for it.

        The engine keeps no connections, so that forked workers (`crash_test`) inherit none.
        """
        address = make_url(self.servers.superuser_url)
        unique = f"{name}_{secrets.token_hex(4)}"
        Postgres(self.servers.home, address.port or 0).create_database(unique)
        ours = make_url(self.servers.addresses["DATABASE_URL"]).set(drivername="postgresql+psycopg2", database=unique)
        return create_engine(ours, poolclass=NullPool)

    def use_sinks(self, **sinks: Mapping[str, Any]) -> None:
        """Set SINKS until the end of the test, and prepare each sink. An address may be `engine.url`."""
        given = {
            name: {
                key: value.render_as_string(hide_password=False) if isinstance(value, URL) else value
                for key, value in entry.items()
            }
            for name, entry in sinks.items()
        }
        os.environ["SINKS"] = json.dumps(given)
        settings.current.cache_clear()
        for sink in open_sinks().all():
            sink.prepare()

    def run_all(self) -> int:
        """Publish everything that is due and run the tasks in this process until nothing is left.

        Return the number of messages. To run tasks that are due later, call `travel` first.
        """
        messages = 0
        with Broker(self._settings.broker_url, transport_options=_options()) as broker:
            while True:
                after_commit_publisher().wait_until_idle(PATIENCE_SECONDS)
                published = relay_of_this_process().tick().sent
                worked = sum(self._consume(broker, queue) for queue in self._settings.ingest_queues)
                messages += worked
                if not published and not worked:
                    return messages
                if messages > MOST_MESSAGES:
                    raise Misuse(f"More than {MOST_MESSAGES:,} messages: the tasks submit each other without end.")

    @contextmanager
    def worker(self) -> Iterator[ChildProcess]:
        """Run a real worker process until the end of the block. Most tests can use `run_all`, which is faster."""
        path = os.pathsep.join(filter(None, [str(ROOT), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
        quiet = ["--without-gossip", "--without-mingle", "-l", "warning"]
        command = [sys.executable, "-m", "celery", "-q", "-A", "tasks", "worker", "-n", "tests@%h", "-c", "1", *quiet]
        environment = {"PYTHONPATH": path, "REMAP_SIGTERM": "SIGQUIT", "PYTHONUNBUFFERED": "1"}
        child = Program("worker", command, environment).start(self.servers.home)
        try:
            child.await_ready()
            yield child
        finally:
            child.end(PATIENCE_SECONDS)
            self.servers.home.pid_file("worker").unlink(missing_ok=True)

    @property
    def _settings(self) -> settings.Settings:
        return settings.current()

    def _consume(self, broker: Broker, queue: str) -> int:
        """Run the messages of a queue; acknowledge each after its tasks are settled, as a worker does."""
        count = 0
        simple = broker.SimpleQueue(queue)
        try:
            while True:
                try:
                    message = simple.get_nowait()
                except simple.Empty:
                    return count
                (ids,), *_ = message.payload
                deliver(engine(), ids)
                message.ack()
                count += 1
        finally:
            simple.close()


def _options() -> dict[str, Any]:
    import celeryconfig  # noqa: PLC0415 - reads the address of the broker when it is imported

    return dict(celeryconfig.broker_transport_options)
