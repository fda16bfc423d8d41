"""Servers for one measurement: started in a temporary folder, durable like the real ones, gone afterwards."""

from __future__ import annotations

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
def scratch_servers() -> Iterator[settings.Settings]:
    """This process talks to servers of its own until the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="celeriac-bench-"))
    folder.chmod(0o755)
    home = Home(folder / "home")
    home.create()
    before = os.environ.get("CELERIAC_HOME")
    try:
        parts, addresses = embedded_servers(home, home.ports(dict.fromkeys(PORTS, 0), wished={}))
        running = [Running(home, part) for part in parts]
        _await(running)
        for part in parts:
            part.finish()
        home.write_stack(addresses)
        os.environ["CELERIAC_HOME"] = str(home.path)
        settings.current.cache_clear()
        engine = make_engine(settings.current().database_url)
        migrate(engine)
        engine.dispose()
        yield settings.current()
    finally:
        stop_parts(home)
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.pop("CELERIAC_HOME")
        if before is not None:
            os.environ["CELERIAC_HOME"] = before
        settings.current.cache_clear()


def _await(running: list[Running]) -> None:
    deadline = time.monotonic() + 30
    while not all(part.is_ready() for part in running):
        if time.monotonic() > deadline:
            raise StartFailed("The servers for the measurement were not ready after 30 s.")
        time.sleep(0.05)
