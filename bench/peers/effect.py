"""The work that every system does for one task, one row into PostgreSQL, and the gate where its processes meet first.

Starting up is not measured: each process waits at the gate with its first task in hand and its connections open, and
the clock starts when all are there. Only the standard library: foreign programs import this file.
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
VALUE: Final = "x" * 100
SINK: Final = "CREATE TABLE bench_sink (n bigint NOT NULL, value text NOT NULL)"
INSERT: Final = "INSERT INTO bench_sink (n, value) VALUES (%s, %s)"


@cache
def pass_gate() -> None:
    """The first time in each process: say that it is here, and wait until the others are, too."""
    folder = Path(os.environ[GATE])
    (folder / str(os.getpid())).touch()
    while not (folder / "open").exists():
        time.sleep(0.001)


def database_url() -> str:
    return os.environ["DATABASE_URL"]


def broker_url() -> str:
    return os.environ["BROKER_URL"]


def begin_again(*command: str) -> None:
    """Become another program of this Python, as a user would have started it."""
    os.execv(sys.executable, [sys.executable, "-m", *command])  # noqa: S606 - ours


def obey(**commands: Callable[..., object]) -> None:
    """Run the command that the command line names; its arguments are numbers and words. What it returns is printed."""
    name, *arguments = sys.argv[1:]
    answer = commands[name](*(int(each) if each.isdecimal() else each for each in arguments))
    sys.stdout.write(json.dumps(answer) + "\n")
