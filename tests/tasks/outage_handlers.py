"""A handler for tests of outages: it has an effect outside the ledger, and ends when the test allows it."""

from __future__ import annotations

import time
from pathlib import Path

from tasks import Task, handler

PATIENCE_SECONDS = 120


@handler("outage.outside", transactional=False, batch=1)
def outside(task: Task) -> str:
    """Add a line to the file `ran`, wait for the file `may-end`, and add a line to the file `ended`."""
    folder = Path(task.payload["folder"])
    _add_line(folder / "ran", str(task.id))
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not (folder / "may-end").exists():
        if time.monotonic() > give_up_at:
            raise TimeoutError("the test has not allowed this handler to end")
        time.sleep(0.01)
    _add_line(folder / "ended", str(task.id))
    return "done"


def _add_line(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(f"{line}\n")
