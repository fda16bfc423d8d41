"""A program of the stack: its command, its role, and how to see that it is ready."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from child_process import ChildProcess
from embedded.home import Home
from settings import ROOT

LOG_LIMIT_BYTES: Final = 10_000_000


@dataclass(frozen=True, slots=True)
class Program:
    """What to start. Without `is_ready`, the program is ready when it has touched its ready file."""

    role: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[], None] = lambda: None  # called before each start
    is_ready: Callable[[], bool] | None = None
    finish: Callable[[], None] = lambda: None  # called once it is ready
    popen_options: Mapping[str, Any] = field(default_factory=dict)

    def start(self, home: Home) -> ChildProcess:
        """Start it with a log and a pid file in this home."""
        self.prepare()
        log = home.log_file(self.role)
        if log.exists() and log.stat().st_size > LOG_LIMIT_BYTES:
            log.replace(log.with_suffix(".log.1"))
        child = ChildProcess(
            self.role,
            self.command,
            log=log,
            ready_file=home.ready_file(self.role),
            is_ready=self.is_ready,
            environment={**os.environ, **self.environment},
            cwd=ROOT,
            popen_options=self.popen_options,
        )
        try:
            child.process.write(home.pid_file(self.role))
        except BaseException:  # `down` stops by pid file and would never find it
            child.kill()
            raise
        return child
