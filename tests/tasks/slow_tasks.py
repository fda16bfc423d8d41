"""A task that takes as long as a test wants. A worker under test gets it with `-I tests.tasks.slow_tasks`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tasks.celery import app

HOLD = "tests.hold"


@app.task(name=HOLD)
def hold(folder: str, seconds: float = 0) -> None:
    """Writes down who works on it, waits until it is released, and works that long."""
    with (Path(folder) / "started").open("a") as started:
        started.write(f"{os.getpid()} {time.time()}\n")
    while not (Path(folder) / "release").exists():
        time.sleep(0.02)
    time.sleep(seconds)
    with (Path(folder) / "finished").open("a") as finished:
        finished.write(f"{os.getpid()} {time.time()}\n")
