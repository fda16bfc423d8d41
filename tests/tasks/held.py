"""The test's end of the task `tests.hold`."""

from __future__ import annotations

from pathlib import Path

from celery import Celery

from tests.servers import wait_until


class Held:
    """One message; it may be worked on more than once, by different processes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder

    def send(self, app: Celery) -> int:
        """Returns the process that works on it, as soon as it does."""
        app.send_task("tests.hold", args=[str(self.folder)])
        return self.started(1)

    def started(self, times: int, *, seconds: float = 20) -> int:
        """Wait for its start number `times`; returns who did that."""
        wait_until(
            lambda: len(self._lines("started")) >= times, f"start number {times} of a held task", seconds=seconds
        )
        return self._lines("started")[times - 1]

    def release(self) -> None:
        (self.folder / "release").touch()

    def finish(self) -> None:
        self.release()
        wait_until(lambda: self.finished_by, "the held task is finished")

    @property
    def started_by(self) -> list[int]:
        return self._lines("started")

    @property
    def finished_by(self) -> list[int]:
        return self._lines("finished")

    def _lines(self, name: str) -> list[int]:
        path = self.folder / name
        return list(map(int, path.read_text().split())) if path.exists() else []
