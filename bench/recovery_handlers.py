"""The handlers of `bench recovery`: one holds a worker process at a gate, one is lost with its process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sqlalchemy.orm import Session

from bench.peers.effect import GATE
from tasks import Task, handler

LOST_BATCH: Final = 10
LONGEST_SECONDS: Final = 300.0


@handler("bench.hold", transactional=False, batch=1)
def hold(task: Task) -> None:
    """Report this process at the gate that the task names, and wait until it opens. No connection is held."""
    folder, gate = Path(os.environ[GATE]), task.payload["gate"]
    (folder / f"{gate}-{os.getpid()}").write_text("waits")
    _await(folder / f"{gate}-open")


# A batch handler: of other handlers a process runs one task alone first, to measure it.
@handler("bench.lost", many=True, batch=LOST_BATCH)
def lost(tasks: Sequence[Task], _db: Session) -> None:
    """Wait to be killed if this is the first batch of its round; otherwise write down when each task started."""
    folder, number = Path(os.environ[GATE]), tasks[0].payload["round"]
    started_at = time.monotonic()
    try:
        with (folder / f"{number}-victim").open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        for task in tasks:
            (folder / f"{number}-started-{task.payload['n']}").write_text(repr(started_at))
    else:
        _await(folder / "never")


def _await(path: Path) -> None:
    give_up_at = time.monotonic() + LONGEST_SECONDS
    while not path.exists():
        if time.monotonic() > give_up_at:
            raise TimeoutError(path.name)
        time.sleep(0.001)
