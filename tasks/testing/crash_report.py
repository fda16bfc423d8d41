"""The report of a crash test: what was left of a task after its worker died at each window."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

from models.status import TaskStatus
from tasks.testing.windows import Window

UNDISTURBED: Final = "no crash"


@dataclass(frozen=True, slots=True)
class Crash:
    """What became of one task whose worker was killed."""

    window: Window | None  # None: its worker was not killed
    task_id: uuid.UUID
    status: TaskStatus
    effects: int
    error: str | None = None  # the last one of the task, or what is left of it in a sink

    @property
    def is_right(self) -> bool:
        return self.effects == 1 and self.status is TaskStatus.SUCCEEDED and self.error is None


@dataclass(frozen=True, slots=True)
class CrashReport:
    """All crashes of a crash test; the first row is the task whose worker was not killed."""

    type: str
    crashes: tuple[Crash, ...]
    passes_left_out: int = 0  # beyond the limit of the test

    @property
    def wrong(self) -> list[Crash]:
        return [crash for crash in self.crashes if not crash.is_right]

    def assert_once(self) -> None:
        """Raise an AssertionError with the table unless every task has succeeded with one effect."""
        if self.wrong:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        rows = [("killed at", "effects", "status", "")]
        rows += [
            (
                str(crash.window or UNDISTURBED),
                str(crash.effects),
                crash.status.value,
                "" if crash.is_right else f"← {crash.error or 'not one effect'}",
            )
            for crash in self.crashes
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
            for row in rows
        ]
        if self.passes_left_out:
            lines.append(f"{self.passes_left_out} more passes of these windows were not tried.")
        found = f"{len(self.wrong)} of {len(self.crashes)} tasks did not end with one effect"
        return "\n".join([f"{self.type}: {found if self.wrong else 'one effect, wherever its worker died'}", *lines])
