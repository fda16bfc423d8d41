"""One process that we started: its pid and the moment it started, so that a reused pid is never taken for ours."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Process:
    """A pid together with its start; the pair is never reused."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, _start_of(pid))

    @classmethod
    def read(cls, path: Path) -> Process | None:
        """The process that a pid file names, whether or not it still lives. A copy of the folder names nobody."""
        try:
            pid, started, folder = path.read_text().split()
            return cls(int(pid), started) if int(folder) == path.parent.stat().st_ino else None
        except (FileNotFoundError, ValueError):
            return None

    def write(self, path: Path) -> None:
        path.write_text(f"{self.pid} {self.started} {path.parent.stat().st_ino}\n")

    def is_alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return _start_of(self.pid) == self.started and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def uptime_seconds(self) -> int:
        with suppress(psutil.Error):
            return max(0, int(time.time() - psutil.Process(self.pid).create_time()))
        return 0

    def ask_to_end(self, number: signal.Signals) -> None:
        if self.is_alive():
            self._signal(number)

    def wait_or_kill(self, seconds: float, *, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Wait for its end, and end its process group if that does not come. True if it ended by itself."""
        if self.wait(seconds, hurry=hurry):
            return True
        self.kill()
        self.wait(5)
        return False

    def kill(self) -> None:
        """SIGKILL to its process group: each part of the stack leads its own."""
        if self.is_alive():
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._signal(signal.SIGKILL)

    def wait(self, seconds: float, *, hurry: Callable[[], bool] = lambda: False) -> bool:
        """True as soon as it has ended, False when the time is over or there is a hurry."""
        deadline = time.monotonic() + seconds
        while self.is_alive():
            self._reap()
            if time.monotonic() > deadline or hurry():
                return False
            time.sleep(0.02)
        return True

    @classmethod
    def marked(cls, variable: str, value: str) -> list[Process]:
        """All processes that inherited this variable from us: the part itself and whatever it left behind."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(variable) == value:
                    found.append(cls.of(process.pid))
        return found

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _reap(self) -> None:
        with suppress(ChildProcessError):  # another process started it
            os.waitpid(self.pid, os.WNOHANG)


def _start_of(pid: int) -> str:
    """On Linux the kernel's own tick count and the boot it counts from: a clock that is set changes neither."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{_boot()}:{fields[19]}"
    except (FileNotFoundError, ProcessLookupError):
        return f"{psutil.Process(pid).create_time():.0f}"  # raises NoSuchProcess; elsewhere there is no /proc


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
