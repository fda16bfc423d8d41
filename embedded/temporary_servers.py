"""Temporary servers: started in a temporary folder, migrated, and removed at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import settings
from child_process import ChildProcess, await_ready
from embedded.home import Home
from embedded.postgres import Postgres
from embedded.roles import PORTS
from embedded.shutdown import stop_programs
from embedded.stack import embedded_servers
from models.engine import make_engine
from models.schema import migrate


@dataclass(frozen=True, slots=True)
class TemporaryServers:
    """The addresses of running temporary servers."""

    home: Home
    addresses: Mapping[str, str]
    superuser_url: str  # of the same database; only a superuser may move the ledger's clock

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables with which a process uses these servers."""
        named = {name: self.addresses[name] for name in settings.SERVER_VARIABLES}
        named["DATABASE_URL"] = _with_driver(named["DATABASE_URL"])  # as `manage.py env` prints it
        return {"CELERIAC_HOME": str(self.home.path), **named}


@contextmanager
def temporary_servers(*, configuration: Mapping[str, str] | None = None) -> Iterator[TemporaryServers]:
    """Run a migrated PostgreSQL, with this configuration, and two Redis servers until the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="celeriac-scratch-"))
    folder.chmod(0o755)
    home = Home(folder / "home")
    home.create()
    running: list[ChildProcess] = []
    try:
        ports = home.ports(dict.fromkeys(PORTS, 0), wished={})
        programs, addresses = embedded_servers(home, ports, configuration=configuration)
        running += [program.start(home) for program in programs]
        await_ready(running, 30)
        for program in programs:
            program.finish()
        home.write_stack(addresses)
        postgres = Postgres(home, ports["postgres"]).url(superuser=True)
        servers = TemporaryServers(home, addresses, _with_driver(postgres))
        with environment(servers.variables):
            engine = make_engine(settings.current().database_url)
            migrate(engine)
            engine.dispose()
        yield servers
    finally:
        stop_programs(home)
        for child in running:
            child.popen.wait(5)  # a process whose last thread is still ending no longer counts as alive
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables until the end of the block, whatever the shell has set.

    Callers empty tables, so they must never reach the user's own servers.
    """
    before = dict(os.environ)
    os.environ.update(variables)
    settings.current.cache_clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        settings.current.cache_clear()


def _with_driver(url: str) -> str:
    """Return the address for SQLAlchemy's `create_engine`, which would look for psycopg 3 otherwise."""
    return url.replace("postgresql://", "postgresql+psycopg2://", 1)
