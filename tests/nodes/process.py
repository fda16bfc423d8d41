"""A local process with the methods of a Docker container that pytest-celery calls."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from child_process import ChildProcess


class LocalProcess:
    """A program that can be started again, with its log and its ready file in `folder`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        cwd: Path,
        environment: Mapping[str, str],
        is_ready: Callable[[], bool] | None = None,
        before_start: Callable[[], None] = lambda: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.command = list(command)
        self.folder = folder
        self.cwd = cwd
        self.environment = dict(environment)
        self.before_start = before_start
        self.name = self.id = folder.name
        self.attrs: dict[str, Any] = {
            "NetworkSettings": {"Networks": {}, "Ports": {}},
            "HostConfig": {"PortBindings": {}},
            "Config": {"Hostname": "127.0.0.1", "Env": []},
        }
        self._is_ready = is_ready
        self.start()

    def start(self) -> None:
        self.before_start()
        self.child = ChildProcess(
            self.name,
            self.command,
            log=self.folder / "output",
            ready_file=self.folder / "ready",
            is_ready=self._is_ready,
            environment=self.environment,
            cwd=self.cwd,
        )

    def is_ready(self) -> bool:
        return self.child.is_ready()

    def await_ready(self, seconds: float = 30) -> None:
        self.child.await_ready(seconds)

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def popen(self) -> subprocess.Popen[bytes]:
        return self.child.popen

    @property
    def status(self) -> str:
        return "running" if self.child.exit_code() is None else "exited"

    def reload(self) -> None:
        self.child.exit_code()

    def logs(self) -> bytes:
        """Return the output since the last start."""
        return self.child.output().encode()

    def kill(self, signal_name: str | int | None = None) -> None:
        """As in a container: SIGKILL ends all processes, any other signal goes to the first one only."""
        number = signal.Signals[signal_name] if isinstance(signal_name, str) else signal_name or signal.SIGKILL
        if number == signal.SIGKILL:
            self.child.process.kill()
            self.popen.wait(10)
        else:
            self.popen.send_signal(number)

    def stop(self, timeout: float = 10) -> None:
        self.child.end(timeout)

    def end(self) -> None:
        """Kill the program and its descendants."""
        self.child.kill()

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
