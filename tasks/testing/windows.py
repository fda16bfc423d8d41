"""Windows: the places where a worker can die. Each is a failpoint, at its n-th pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """A failpoint, at its n-th pass."""

    name: str
    nth: int = 1

    def failpoints(self, action: str) -> str:
        """Return what `failpoint.arm` needs to act here."""
        return f"{self.name}={action}@{self.nth}"

    def __str__(self) -> str:
        return self.name if self.nth == 1 else f"{self.name} (pass {self.nth})"


def read_windows(trace: Path) -> list[Window]:
    """Return the windows that a process has passed, in their order, from its FAILPOINT_TRACE."""
    passes = Counter[str]()
    windows = []
    for name in trace.read_text().split() if trace.exists() else ():
        passes[name] += 1
        windows.append(Window(name, passes[name]))
    return windows
