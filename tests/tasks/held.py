"""Control the Celery task `tests.hold` from a test."""

from __future__ import annotations

from pathlib import Path

from celery import Celery

from tests.servers import wait_until


class Held:
    """Messages whose task runs until the test releases it. A message may be delivered more than once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder

    def send(self, app: Celery) -> int:
        """Send one message, wait until it runs, and return the pid of its process."""
        self.put(app)
        return self.started(1)

    def put(self, app: Celery, *, messages: int = 1, seconds: float = 0) -> None:
        for _ in range(messages):
            app.send_task("tests.hold", args=[str(self.folder), seconds])

    def started(self, times: int) -> int:
        """Wait for start number `times`; return the pid of its process."""
        wait_until(lambda: len(self._lines("started")) >= times, f"start number {times} of a held task")
        return int(self._lines("started")[times - 1][0])

    def release(self) -> None:
        (self.folder / "release").touch()

    def finish(self, *, messages: int = 1) -> None:
        self.release()
        wait_until(lambda: len(self._lines("finished")) >= messages, f"{messages} held task(s) are finished")

    @property
    def finished_by(self) -> list[int]:
        return [int(pid) for pid, _ in self._lines("finished")]

    @property
    def finished_at(self) -> list[float]:
        return [float(moment) for _, moment in self._lines("finished")]

    def _lines(self, name: str) -> list[list[str]]:
        path = self.folder / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []
