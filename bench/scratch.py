"""Temporary servers for one measurement, with the durable configuration of the embedded stack."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import make_url

import settings
from child_process import ChildProcess, OwnProcess, await_ready
from embedded.home import Home
from embedded.postgres import Postgres
from embedded.roles import PORTS
from embedded.stack import embedded_servers
from embedded.temporary_servers import environment, temporary_servers
from models.engine import make_engine

_restarted: Final[list[ChildProcess]] = []


@contextmanager
def scratch_servers(*, stream: str | None = None) -> Iterator[settings.Settings]:
    """Point this process at temporary servers until the end of the block. `stream` becomes an outbox destination."""
    try:
        with temporary_servers() as servers:
            variables = servers.variables
            if stream:
                address = servers.addresses["REDIS_URL"].replace("redis://", "redis-stream://", 1)
                variables["OUTBOX_DESTINATIONS"] = json.dumps({stream: f"{address}?stream={stream}"})
            with environment(variables):
                yield settings.current()
    finally:
        while _restarted:
            _restarted.pop().popen.wait(5)  # it was ended by its pid file


@contextmanager
def postgres_stopped(current: settings.Settings) -> Iterator[None]:
    """Stop the temporary PostgreSQL, which ends all its sessions, and start it again at the end of the block."""
    home = Home(current.celeriac_home)
    process = OwnProcess.read(home.pid_file("postgres"))
    assert process is not None
    process.send_signal(signal.SIGINT)
    assert process.wait(30), "PostgreSQL did not stop"
    try:
        yield
    finally:
        ports = dict.fromkeys(PORTS, 0) | {"postgres": make_url(current.database_url).port or 0}
        programs, _ = embedded_servers(home, ports)
        (postgres,) = (program for program in programs if program.role == "postgres")
        _restarted.append(again := postgres.start(home))
        await_ready([again], 30)


def write_checkpoint(current: settings.Settings) -> None:
    """Let the temporary PostgreSQL write a checkpoint, as it does when it is stopped."""
    postgres = Postgres(Home(current.celeriac_home), make_url(current.database_url).port or 0)
    url = postgres.url(superuser=True).replace("postgresql:", "postgresql+psycopg2:", 1)
    superuser = make_engine(url, isolation_level="AUTOCOMMIT")
    with superuser.connect() as connection:
        connection.exec_driver_sql("CHECKPOINT")
    superuser.dispose()
