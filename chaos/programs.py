"""Real programs for a run: `celery -A tasks worker` and beat, each in a session of its own, ended by pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from embedded.part import READY_FILE
from models.errors import CeleriacError
from settings import ROOT


class NotReady(CeleriacError):
    """A program did not become ready in time."""

    code = "not_ready"


class Program:
    """`celery -A tasks …` with the environment of this process."""

    def __init__(self, folder: Path, name: str, *arguments: str, **variables: str) -> None:
        self.name = name
        self.ready_file = folder / f"{name}.ready"
        self.log = folder / f"{name}.log"
        command = [str(Path(sys.executable).with_name("celery")), "-A", "tasks", *arguments]
        environment = {**os.environ, **variables, READY_FILE: str(self.ready_file), "REMAP_SIGTERM": "SIGQUIT"}
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_ready(self, seconds: float = 30) -> None:
        try:
            wait_until(lambda: self.ready_file.exists() or self.popen.poll() is not None, self.name, seconds=seconds)
        except NotReady:
            raise NotReady(f"{self.name} was not ready after {seconds:g} s: {self._last_words()}") from None
        if not self.ready_file.exists():
            raise NotReady(f"{self.name} has ended: {self._last_words()}")

    def _last_words(self) -> str:
        return (self.log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]

    def kill(self) -> None:
        """With everything that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def end(self) -> None:
        self.popen.terminate()
        try:
            self.popen.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()


def worker(folder: Path, name: str, **variables: str) -> Program:
    return Program(
        folder, name, "worker", "-c", "2", "-n", f"{name}@%h", "--without-gossip", "--without-mingle", **variables
    )


@contextmanager
def running(*programs: Program) -> Iterator[None]:
    """From the moment that all are ready; all of them are ended with the block."""
    try:
        for program in programs:
            program.await_ready()
        yield
    finally:
        for program in programs:
            program.end()


def wait_until(condition: Callable[[], object], what: str, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise NotReady(f"After {seconds:g} s this was not so: {what}.")
        time.sleep(0.05)
