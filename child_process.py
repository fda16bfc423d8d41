"""Child processes: start a program, wait until it is ready, end it with everything it started.

A child has a session of its own, so that Ctrl-C reaches us alone and its process group can be killed as a whole. The
kernel reuses pids, so a process is known by its pid and its start time together. Descendants inherit READY_FILE, which
finds those that left the process group. Processes are never ended by name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import psutil

from models.errors import CeleriacError

READY_FILE: Final = "CELERIAC_READY_FILE"  # names the file that a program touches when it is ready


class StartFailed(CeleriacError):
    """A program did not start.

    A server, a worker or another program of the stack could not be started, ended early, or was not ready in time.
    """

    code = "start_failed"
    remedy = "Remove the cause that the message quotes from the program's log, and start again."


@dataclass(frozen=True, slots=True)
class OwnProcess:
    """A process of ours, which may have ended: its pid and its start time. The pair is never reused."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> OwnProcess:
        return cls(pid, _start_of(pid))

    @classmethod
    def read(cls, path: Path) -> OwnProcess | None:
        """Return the process that a pid file names. A file in a copied folder names none."""
        try:
            pid, started, folder = path.read_text().split()
            return cls(int(pid), started) if int(folder) == path.parent.stat().st_ino else None
        except (FileNotFoundError, ValueError):
            return None

    @classmethod
    def with_variable(cls, name: str, value: str) -> list[OwnProcess]:
        """Return all processes that have this environment variable; descendants inherit it."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(name) == value:
                    found.append(cls.of(process.pid))
        return found

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

    def send_signal(self, number: signal.Signals) -> None:
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, seconds: float, *, is_urgent: Callable[[], bool] = lambda: False) -> bool:
        """Return True when the process has ended, False when the time is over or the end became urgent."""
        deadline = time.monotonic() + seconds
        while self.is_alive():
            if time.monotonic() > deadline or is_urgent():
                return False
            time.sleep(0.02)
        return True

    def wait_or_kill(self, seconds: float, *, is_urgent: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the end, and kill the process group if it does not come. Return True if it ended by itself."""
        if self.wait(seconds, is_urgent=is_urgent):
            return True
        self.kill()
        self.wait(5)
        return False

    def kill(self) -> None:
        """Send SIGKILL to the process group that the process leads, or to the process if it leads none."""
        if self.is_alive():
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self.send_signal(signal.SIGKILL)


class ChildProcess:
    """A program that we started. With `ready_file`, its descendants can be found and ended too.

    It is ready when `is_ready` says so; without `is_ready`, when it has touched its ready file. It writes to `log`, or
    to our own output if there is no log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path | None = None,
        ready_file: Path | None = None,
        is_ready: Callable[[], bool] | None = None,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        popen_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.ready_file = ready_file
        self._is_ready = is_ready
        variables = dict(os.environ if environment is None else environment)
        if ready_file:
            ready_file.unlink(missing_ok=True)
            variables[READY_FILE] = str(ready_file)
        self._log_start = log.stat().st_size if log and log.exists() else 0
        with (log or Path(os.devnull)).open("ab") as file:
            output = {"stdout": file, "stderr": subprocess.STDOUT} if log else {}
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, **output, **(popen_options or {})}
            self.popen = subprocess.Popen(list(command), cwd=cwd, env=variables, start_new_session=True, **options)
        self.process = OwnProcess.of(self.popen.pid)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def is_ready(self) -> bool:
        if self._is_ready:
            return self._is_ready()
        return self.ready_file is not None and self.ready_file.exists()

    def exit_code(self) -> int | None:
        return self.popen.poll()

    def output(self) -> str:
        """Return what the program has written to its log since it was started."""
        if self.log is None:
            return ""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace").strip()

    def last_lines(self, count: int = 5) -> str:
        return "\n".join(self.output().splitlines()[-count:])

    def await_ready(self, seconds: float = 30) -> None:
        """Raise StartFailed if the program ends or is not ready in time."""
        await_ready([self], seconds)

    def end(self, seconds: float = 15, *, stop_signal: signal.Signals = signal.SIGTERM) -> None:
        """Ask the program to end; kill it if it does not, and whatever it left behind."""
        end_all([self], seconds, stop_signal=stop_signal)

    def kill(self) -> None:
        """Kill the program and its descendants."""
        self.process.kill()
        self.popen.wait()
        if self.ready_file:
            kill_descendants(self.ready_file)


def await_ready(
    children: Iterable[ChildProcess], seconds: float, *, check: Callable[[], object] = lambda: None
) -> None:
    """Wait until all are ready. Raise StartFailed if one ends or is late; `check` may raise something else."""
    waiting = list(children)
    deadline = time.monotonic() + seconds
    while waiting:
        check()
        for child in list(waiting):
            code = child.exit_code()
            if code is not None:
                raise StartFailed(f"{child.name} ended with code {code}:\n{child.last_lines()}")
            if child.is_ready():
                waiting.remove(child)
            elif time.monotonic() > deadline:
                raise StartFailed(f"{child.name} was not ready after {seconds:g} s:\n{child.last_lines()}")
        time.sleep(0.02)


def end_all(
    children: Iterable[ChildProcess], seconds: float = 15, *, stop_signal: signal.Signals = signal.SIGTERM
) -> None:
    """Ask all to end at the same time, and kill what is left of them when the time is over."""
    children = list(children)
    for child in children:
        child.process.send_signal(stop_signal)
    deadline = time.monotonic() + seconds
    try:
        for child in children:
            child.process.wait(max(0.0, deadline - time.monotonic()))
    finally:  # also when Ctrl-C cuts the wait short
        for child in children:
            child.kill()


def kill_descendants(ready_file: Path) -> None:
    """Kill every process that inherited this ready file. A killed worker, for example, leaves its children behind."""
    for process in OwnProcess.with_variable(READY_FILE, str(ready_file)):
        process.kill()
        process.wait(5)
    ready_file.unlink(missing_ok=True)


def _start_of(pid: int) -> str:
    """Return the start time of a process.

    On Linux that is the kernel's tick count and the boot it counts from; setting the clock changes neither.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{_boot_id()}:{fields[19]}"
    except (FileNotFoundError, ProcessLookupError):
        return f"{psutil.Process(pid).create_time():.0f}"  # raises NoSuchProcess; other systems have no /proc


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
