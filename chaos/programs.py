"""Real Celery programs for the demo and for tests: `celery -A tasks worker` and `celery -A tasks beat`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from child_process import ChildProcess, await_ready, end_all
from models.errors import CeleriacError
from settings import ROOT


class NotInTime(CeleriacError):
    """An expected event did not happen in time.

    The demo waits for workers to make progress, and gives up after a minute.
    """

    code = "not_in_time"
    remedy = "Run it again while the machine is less busy."


def start_celery(
    folder: Path, name: str, *arguments: str, application: str = "tasks", **variables: str
) -> ChildProcess:
    """Start `celery -A tasks …` with the environment of this process; its log and ready file are in `folder`."""
    return ChildProcess(
        name,
        [str(Path(sys.executable).with_name("celery")), "-A", application, *arguments],
        log=folder / f"{name}.log",
        ready_file=folder / f"{name}.ready",
        environment={**os.environ, **variables, "REMAP_SIGTERM": "SIGQUIT"},
        cwd=ROOT,
    )


def start_worker(folder: Path, name: str, **variables: str) -> ChildProcess:
    options = ("-c", "2", "-n", f"{name}@%h", "--without-gossip", "--without-mingle")
    return start_celery(folder, name, "worker", *options, **variables)


@contextmanager
def running(*programs: ChildProcess) -> Iterator[None]:
    """Wait until all programs are ready, run the block, then end them all."""
    try:
        await_ready(programs, 30)
        yield
    finally:
        end_all(programs)


def wait_until(condition: Callable[[], object], what: str, *, seconds: float) -> None:
    """Raise NotInTime if the condition does not become true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise NotInTime(f"Not within {seconds:g} s: {what}.")
        time.sleep(0.05)
