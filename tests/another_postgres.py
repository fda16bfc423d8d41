"""Provide a PostgreSQL of another version than the embedded one: TEST_DATABASE_URL, or an installed server."""

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
from embedded.postgres import Postgres
from embedded.program import Program
from tests.servers import Cluster, GivenServer, wait_until

MISSING = "another PostgreSQL: install one, or set TEST_DATABASE_URL"


@contextmanager
def another_postgres(home: Home) -> Iterator[Cluster]:
    """Yield the server; skip the test if there is none."""
    if url := os.environ.get("TEST_DATABASE_URL"):
        yield Cluster(GivenServer(url))
    elif install := find_installed():
        with started(install, home) as cluster:
            yield cluster
    else:
        pytest.skip(MISSING)


def find_installed() -> Path | None:
    """Return the folder of an installed server (with `bin/initdb`): Debian's newest, else the one of pg_config."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*"), reverse=True)
    if pg_config := shutil.which("pg_config"):
        bin_folder = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=True).stdout.strip()
        folders.append(Path(bin_folder).parent)
    return next((folder for folder in folders if (folder / "bin" / "initdb").exists()), None)


@contextmanager
def started(install: Path, home: Home) -> Iterator[Cluster]:
    """Yield a server of that installation, which runs until the end of the block."""
    inner = Home(home.path.parent / "another")
    inner.create()
    port = inner.ports({"postgres": 0}, wished={})["postgres"]
    server = Postgres(inner, port, install=install, configuration={"fsync": "off", "max_connections": "100"})
    child = Program("postgres", server.command, prepare=server.prepare).start(inner)
    try:
        wait_until(server.is_ready, f"the PostgreSQL in {install} is ready")
        yield Cluster(server)
    finally:
        child.end(20, stop_signal=signal.SIGINT)
