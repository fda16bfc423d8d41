"""A Celery task that runs until the test releases it. A worker loads it with `-I tests.tasks.slow_tasks`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tasks.celery import app

HOLD = "tests.hold"


@app.task(name=HOLD)
def hold(folder: str, seconds: float = 0) -> None:
    """Record this process in a file, wait for the release, and run for `seconds` more."""
    with (Path(folder) / "started").open("a") as started:
        started.write(f"{os.getpid()} {time.time()}\n")
    while not (Path(folder) / "release").exists():
        time.sleep(0.02)
    time.sleep(seconds)
    with (Path(folder) / "finished").open("a") as finished:
        finished.write(f"{os.getpid()} {time.time()}\n")
