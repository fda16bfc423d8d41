"""The work of every task, one row inserted into PostgreSQL, and the gate where all processes wait for the start.

The start of the programs is not measured: each process waits at the gate with its first task and open connections, and
the clock starts when all wait there. Foreign programs import this file, so it needs only the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

PROCESSES: Final = 2
CLIENTS: Final = 4  # threads that submit one by one
PAUSE_SECONDS: Final = 0.03  # between single tasks: light load
GATE: Final = "BENCH_GATE"
SLOW_URL: Final = "BENCH_SLOW_URL"
CONCURRENCY: Final = "BENCH_CONCURRENCY"
AT_ONCE: Final = 100  # tasks that wait for the network at the same time, in both processes together
VALUE: Final = "x" * 100
SINK: Final = "CREATE TABLE bench_sink (n bigint NOT NULL, value text NOT NULL)"
INSERT: Final = "INSERT INTO bench_sink (n, value) VALUES (%s, %s)"


@cache
def pass_gate() -> None:
    """Report this process at the gate and wait until it opens. Later calls in the same process do nothing."""
    folder = Path(os.environ[GATE])
    (folder / str(os.getpid())).touch()
    while not (folder / "open").exists():
        time.sleep(0.001)


def database_url() -> str:
    """Return the address for a driver; DATABASE_URL names SQLAlchemy's."""
    return os.environ["DATABASE_URL"].replace("+psycopg2", "", 1)


def broker_url() -> str:
    return os.environ["BROKER_URL"]


def slow_url() -> str:
    """Return the address of the server that answers slowly (`bench/slow_server.py`)."""
    return os.environ[SLOW_URL]


def concurrency() -> int:
    """Return how many tasks of `bench async` run at once in a process."""
    return int(os.environ.get(CONCURRENCY, AT_ONCE))


def become(*command: str) -> None:
    """Replace this process by another program of the same Python."""
    os.execv(sys.executable, [sys.executable, "-m", *command])  # noqa: S606 - our own command


def run_command(**commands: Callable[..., object]) -> None:
    """Run the command that the command line names, with numbers and words as arguments, and print its result."""
    name, *arguments = sys.argv[1:]
    answer = commands[name](*(int(each) if each.isdecimal() else each for each in arguments))
    sys.stdout.write(json.dumps(answer) + "\n")
