"""Servers for a while: started in a temporary folder, migrated, never anybody else's, and gone afterwards."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import settings
from embedded.errors import StartFailed
from embedded.home import Home
from embedded.part import Running
from embedded.postgres import Postgres
from embedded.roles import PORTS
from embedded.stack import embedded_servers
from embedded.stop_parts import stop_parts
from models.engine import make_engine
from models.schema import migrate


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where they are."""

    home: Home
    addresses: Mapping[str, str]
    superuser_url: str  # of the same database; only such a role may move the clock

    @property
    def variables(self) -> dict[str, str]:
        """With these set, a process talks to them."""
        named = {name: self.addresses[name] for name in settings.SERVER_VARIABLES}
        return {"CELERIAC_HOME": str(self.home.path), **named}


@contextmanager
def scratch(*, configuration: Mapping[str, str] | None = None) -> Iterator[Scratch]:
    """PostgreSQL at head, with its `configuration`, and two Redis servers, until the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="celeriac-scratch-"))
    folder.chmod(0o755)
    home = Home(folder / "home")
    home.create()
    running: list[Running] = []
    try:
        ports = home.ports(dict.fromkeys(PORTS, 0), wished={})
        parts, addresses = embedded_servers(home, ports, configuration=configuration)
        running += [Running(home, part) for part in parts]
        wait_until_ready(running)
        for one in parts:
            one.finish()
        home.write_stack(addresses)
        postgres = Postgres(home, ports["postgres"]).url(superuser=True)
        servers = Scratch(home, addresses, postgres.replace("postgresql://", "postgresql+psycopg2://", 1))
        with environment(servers.variables):
            engine = make_engine(settings.current().database_url)
            migrate(engine)
            engine.dispose()
        yield servers
    finally:
        stop_parts(home)
        for part in running:
            part.popen.wait(5)  # its last thread may still be going when it no longer counts as alive
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Over whatever the shell has set: who empties tables here must never meet somebody's own servers."""
    before = dict(os.environ)
    os.environ.update(variables)
    settings.current.cache_clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        settings.current.cache_clear()


def wait_until_ready(running: list[Running]) -> None:
    deadline = time.monotonic() + 30
    while not all(part.is_ready() for part in running):
        if ended := next((part for part in running if part.exit_code() is not None), None):
            raise StartFailed(f"The {ended.part.role} ended before it was ready: {ended.last_words()}")
        if time.monotonic() > deadline:
            raise StartFailed("The servers were not ready after 30 s.")
        time.sleep(0.02)
