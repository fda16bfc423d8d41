"""Follow the logs of a stack: each line is printed behind the coloured name of its program."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from embedded.home import Home

COLOURS: Final = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")


class LogFollower(threading.Thread):
    """Prints the lines that are appended to the logs of `roles` from now on, until it is stopped."""

    def __init__(self, home: Home, roles: Iterable[str], console: Console) -> None:
        super().__init__(name="log-follower", daemon=True)
        self.console = console
        self.logs = {role: home.log_file(role) for role in roles}
        self.width = max(map(len, self.logs))
        self.read_to = {role: _size(path) for role, path in self.logs.items()}
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.2):
            self.print_new_lines()
        self.print_new_lines()

    def stop(self) -> None:
        self.stopped.set()
        self.join(2)

    def print_new_lines(self) -> None:
        for (role, path), colour in zip(self.logs.items(), itertools.cycle(COLOURS), strict=False):
            for line in self._new_lines(role, path):
                self.console.print(Text.assemble((f"{role:<{self.width}} │ ", colour), line), soft_wrap=True)

    def _new_lines(self, role: str, path: Path) -> list[str]:
        if _size(path) < self.read_to[role]:
            self.read_to[role] = 0  # the log was rotated
        if not path.exists():
            return []
        with path.open("rb") as log:
            log.seek(self.read_to[role])
            whole, newline, _ = log.read().rpartition(b"\n")
        self.read_to[role] += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines() if newline else []


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
