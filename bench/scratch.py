"""Servers for one measurement: started in a temporary folder, durable like the real ones, gone afterwards."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import settings
from embedded.failures import StartFailed
from embedded.home import Home
from embedded.part import Running
from embedded.roles import PORTS
from embedded.stack import embedded_servers
from embedded.stopping import stop_parts
from models.engine import make_engine
from models.schema import migrate


@contextmanager
def scratch_servers(*, stream: str | None = None) -> Iterator[settings.Settings]:
    """This process talks to servers of its own until the end of the block. `stream` becomes a destination."""
    folder = Path(tempfile.mkdtemp(prefix="celeriac-bench-"))
    folder.chmod(0o755)
    home = Home(folder / "home")
    home.create()
    running: list[Running] = []
    try:
        parts, addresses = embedded_servers(home, home.ports(dict.fromkeys(PORTS, 0), wished={}))
        running += [Running(home, part) for part in parts]
        _await(running)
        for one in parts:
            one.finish()
        home.write_stack(addresses)
        variables = {"CELERIAC_HOME": str(home.path), **{name: addresses[name] for name in settings.SERVER_VARIABLES}}
        if stream:
            address = addresses["REDIS_URL"].replace("redis://", "redis-stream://", 1)
            variables["OUTBOX_DESTINATIONS"] = json.dumps({stream: f"{address}?stream={stream}"})
        with _environment(variables):
            engine = make_engine(settings.current().database_url)
            migrate(engine)
            engine.dispose()
            yield settings.current()
    finally:
        stop_parts(home)
        for part in running:
            part.exit_code()  # asked for, so that nobody takes it for running
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Over whatever the shell has set: a measurement empties tables, and must never meet somebody's own servers."""
    before = dict(os.environ)
    os.environ.update(variables)
    settings.current.cache_clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        settings.current.cache_clear()


def _await(running: list[Running]) -> None:
    deadline = time.monotonic() + 30
    while not all(part.is_ready() for part in running):
        if time.monotonic() > deadline:
            raise StartFailed("The servers for the measurement were not ready after 30 s.")
        time.sleep(0.05)
