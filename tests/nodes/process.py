"""A process that answers what pytest-docker-tools and pytest-celery ask of a Docker container, and nothing more."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from embedded.process import Process
from tests.servers import wait_until

MARK = "CELERIAC_TEST_NODE"


class LocalProcess:
    """One program in a session of its own, with a log file; found again by a variable that its children inherit."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        cwd: Path,
        environment: Mapping[str, str],
        is_ready: Callable[[], bool],
        before_start: Callable[[], None] = lambda: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.command = list(command)
        self.folder = folder
        self.cwd = cwd
        self.environment = {**environment, MARK: str(folder)}
        self.is_ready = is_ready
        self.before_start = before_start
        self.name = folder.name
        self.id = folder.name
        self.attrs: dict[str, Any] = {
            "NetworkSettings": {"Networks": {}, "Ports": {}},
            "HostConfig": {"PortBindings": {}},
            "Config": {"Hostname": "127.0.0.1", "Env": []},
        }
        self._log = folder / "output"
        self._log_start = 0
        self.start()

    def start(self) -> None:
        self.before_start()
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self.popen = subprocess.Popen(
                self.command,
                cwd=self.cwd,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_ready(self, seconds: float = 30) -> None:
        """Fails with the program's own words if it ends instead."""

        def ready_or_gone() -> bool:
            return self.status == "exited" or self.is_ready()

        wait_until(ready_or_gone, f"{self.name} is ready", seconds=seconds)
        if self.status == "exited":
            raise AssertionError(f"{self.name} ended with code {self.popen.returncode}:\n{self.logs().decode()}")

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def status(self) -> str:
        return "running" if self.popen.poll() is None else "exited"

    def reload(self) -> None:
        self.popen.poll()

    def logs(self) -> bytes:
        """Since the last start: the words of an earlier life must not be taken for this one's."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read()

    def kill(self, signal_name: str | int | None = None) -> None:
        """As with a container: SIGKILL ends everything in it, any other signal goes to the first process alone."""
        number = signal.Signals[signal_name] if isinstance(signal_name, str) else signal_name or signal.SIGKILL
        if number == signal.SIGKILL:
            self.kill_group()
        else:
            self.popen.send_signal(number)

    def kill_group(self) -> None:
        if self.status == "running":  # its number is ours until it is reaped
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait(10)

    def stop(self, timeout: float = 10) -> None:
        """Ask, then end it; and then whatever it left behind in other sessions."""
        if self.status == "running":
            self.popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout)
        self.end()

    def end(self) -> None:
        """At once."""
        self.kill_group()
        for left in Process.marked(MARK, str(self.folder)):
            left.kill()
            left.wait(5)

    def restart(self, timeout: float = 10) -> None:
        self.stop(timeout)
        self.start()

    def exec_run(self, command: str | Sequence[str], **_: Any) -> tuple[int, bytes]:
        done = subprocess.run(
            command,
            shell=isinstance(command, str),
            cwd=self.cwd,
            env=self.environment,
            capture_output=True,
            check=False,
        )
        return done.returncode, done.stdout or done.stderr
