"""A PostgreSQL of another version than the embedded one: the server of TEST_DATABASE_URL, or one that is installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from embedded.home import Home
from embedded.part import Part, Running
from embedded.postgres import Postgres
from tests.servers import Cluster, GivenServer, wait_until

NONE = "another PostgreSQL: none is installed and TEST_DATABASE_URL is not set"


@contextmanager
def another_postgres(home: Home) -> Iterator[Cluster]:
    """Skips the test where there is none."""
    if url := os.environ.get("TEST_DATABASE_URL"):
        yield Cluster(GivenServer(url))
    elif install := find_installed():
        with started(install, home) as cluster:
            yield cluster
    else:
        pytest.skip(NONE)


def find_installed() -> Path | None:
    """The folder of an installed server, whose `bin` has initdb: Debian's, or the one pg_config knows."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*"), reverse=True)
    if pg_config := shutil.which("pg_config"):
        said = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=True).stdout.strip()
        folders.append(Path(said).parent)
    return next((folder for folder in folders if (folder / "bin" / "initdb").exists()), None)


@contextmanager
def started(install: Path, home: Home) -> Iterator[Cluster]:
    inner = Home(home.path.parent / "another")
    inner.create()
    port = inner.ports({"postgres": 0}, wished={})["postgres"]
    server = Postgres(inner, port, install=install, configuration={"fsync": "off", "max_connections": "100"})
    running = Running(inner, Part("postgres", server.command, prepare=server.prepare))
    try:
        wait_until(server.is_ready, f"the PostgreSQL in {install} is ready")
        yield Cluster(server)
    finally:
        running.process.ask_to_end(signal.SIGINT)
        running.popen.wait(20)
