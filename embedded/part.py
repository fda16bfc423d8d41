"""One part of a stack: a process with a role, a log, a pid file, and a way to tell that it is ready."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from embedded.home import Home
from embedded.process import Process
from settings import ROOT

LOG_LIMIT_BYTES: Final = 10_000_000
READY_FILE: Final = "CELERIAC_READY_FILE"


@dataclass(frozen=True, slots=True)
class Part:
    """What to start, and how to see that it is ready; without `is_ready` the part writes its ready file itself."""

    role: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[], None] = lambda: None
    is_ready: Callable[[], bool] | None = None
    finish: Callable[[], None] = lambda: None
    popen_options: Mapping[str, Any] = field(default_factory=dict)


class Running:
    """A part that was started here."""

    def __init__(self, home: Home, part: Part) -> None:
        self.part = part
        self.home = home
        self.ready_file = home.ready_file(part.role)
        self.ready_file.unlink(missing_ok=True)
        part.prepare()
        log_path = home.log_file(part.role)
        if log_path.exists() and log_path.stat().st_size > LOG_LIMIT_BYTES:
            log_path.replace(log_path.with_suffix(".log.1"))
        self.log_start = log_path.stat().st_size if log_path.exists() else 0
        environment = dict(os.environ) | dict(part.environment) | {READY_FILE: str(self.ready_file)}
        with log_path.open("ab") as log:
            self.popen = subprocess.Popen(
                list(part.command),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone
                **part.popen_options,
            )
        try:
            self.process = Process.of(self.popen.pid)
            self.process.write(home.pid_file(part.role))
        except BaseException:  # without a pid file nobody would ever stop it
            self.popen.kill()
            self.popen.wait()
            raise

    def is_ready(self) -> bool:
        return self.part.is_ready() if self.part.is_ready else self.ready_file.exists()

    def exit_code(self) -> int | None:
        return self.popen.poll()

    def last_words(self, lines: int = 5) -> str:
        """The end of what it wrote since it was started."""
        with self.home.log_file(self.part.role).open("rb") as log:
            log.seek(self.log_start)
            said = log.read().decode(errors="replace").strip().splitlines()
        return "\n".join(said[-lines:])


def end_remains(home: Home, role: str) -> None:
    """After a part has ended: end what it left behind. A killed worker leaves its children."""
    for process in Process.marked(READY_FILE, str(home.ready_file(role))):
        process.kill()
        process.wait(5)
    home.ready_file(role).unlink(missing_ok=True)
