"""A whole stack in the hands of a user's tests: real servers, and this process, or a real one, as the worker."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import redis
from kombu import Connection as Broker
from sqlalchemy import Engine, create_engine, text

import settings
from embedded.part import Part, Running, end_remains
from embedded.temporary_servers import Scratch, wait_until_ready
from models.engine import engine
from models.errors import Misuse
from models.sql import sql
from models.tables import Base
from outbox.after_commit_publisher import submitter
from settings import ROOT
from tasks.execution.deliver import ingest
from tasks.testing.clock import MOVE
from tasks.ticks import relay_of_this_process

MOST_MESSAGES: Final = 100_000
PATIENCE_SECONDS: Final = 10.0
# What a test that failed half-way has left open would hold up whoever empties the tables.
END_LEFT_TRANSACTIONS: Final = text("""
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'
""")


class StackOfTests:
    """PostgreSQL, the broker and the receipt Redis of a test run. Your own tables are yours to make and to empty."""

    def __init__(self, servers: Scratch) -> None:
        self.servers = servers
        self.superuser = create_engine(servers.superuser_url)

    @property
    def engine(self) -> Engine:
        """The shared engine of this process: what your code gets from `models.engine.engine()`."""
        return engine()

    def empty(self) -> None:
        """No task, no event, no message, and the clock as it was."""
        submitter().flush(PATIENCE_SECONDS)  # whoever still publishes needs the tables in another order
        with self.superuser.begin() as connection:
            connection.execute(END_LEFT_TRANSACTIONS)
            connection.execute(sql(f"TRUNCATE {', '.join(Base.metadata.tables)} RESTART IDENTITY"))
        for variable in ("BROKER_URL", "REDIS_URL"):
            with redis.Redis.from_url(self.servers.addresses[variable]) as client:
                client.flushall()

    def travel(self, by: timedelta | None = None, **how_far: Any) -> None:
        """Move the ledger's clock on, for every process, until the next test."""
        with self.superuser.begin() as connection:
            connection.execute(MOVE, {"by": by if by is not None else timedelta(**how_far)})

    def run_all(self) -> int:
        """Publish what is due, take the messages from the broker and work them off here, until nothing is left.

        Returns how many messages there were. What is due later stays: `travel` first.
        """
        messages = 0
        with Broker(self._settings.broker_url, transport_options=_options()) as broker:
            while True:
                submitter().flush(PATIENCE_SECONDS)
                published = relay_of_this_process().tick().sent
                worked = sum(self._work_off(broker, queue) for queue in self._settings.ingest_queues)
                messages += worked
                if not published and not worked:
                    return messages
                if messages > MOST_MESSAGES:
                    raise Misuse(f"After {MOST_MESSAGES:,} messages there are more: tasks submit each other for ever.")

    @contextmanager
    def worker(self) -> Iterator[Running]:
        """A real worker process for a while. It takes seconds to start: `run_all` does for most tests."""
        path = os.pathsep.join(filter(None, [str(ROOT), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
        quiet = ["--without-gossip", "--without-mingle", "-l", "WARNING"]
        command = [sys.executable, "-m", "celery", "-q", "-A", "tasks", "worker", "-n", "tests@%h", "-c", "1", *quiet]
        environment = {"PYTHONPATH": path, "REMAP_SIGTERM": "SIGQUIT", "PYTHONUNBUFFERED": "1"}
        home = self.servers.home
        running = Running(home, Part("worker", command, environment))
        try:
            wait_until_ready([running])
            yield running
        finally:
            running.process.ask_to_end(signal.SIGTERM)
            running.process.wait_or_kill(PATIENCE_SECONDS)
            end_remains(home, "worker")
            home.pid_file("worker").unlink(missing_ok=True)
            running.popen.wait(5)

    @property
    def _settings(self) -> settings.Settings:
        return settings.current()

    def _work_off(self, broker: Broker, queue: str) -> int:
        """Acknowledged when it is settled, as a worker does."""
        count = 0
        simple = broker.SimpleQueue(queue)
        try:
            while True:
                try:
                    message = simple.get_nowait()
                except simple.Empty:
                    return count
                (ids,), *_ = message.payload
                ingest(engine(), ids)
                message.ack()
                count += 1
        finally:
            simple.close()


def _options() -> dict[str, Any]:
    import celeryconfig  # noqa: PLC0415 - it reads the address of the broker when it is imported

    return dict(celeryconfig.broker_transport_options)
