"""The programs of a measurement: started with their own environment, watched, and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.peers.effect import GATE, PROCESSES
from child_process import ChildProcess, end_all
from models.errors import CeleriacError
from settings import ROOT

PEERS_PYTHON: Final = ROOT / ".venv-bench" / "bin" / "python"
FOREIGN: Final = ("dramatiq", "procrastinate", "pgqueuer")
PATIENCE_SECONDS: Final = 60.0


class MeasurementFailed(CeleriacError):
    """The benchmark failed.

    A measured system crashed, did not finish in time, or left tasks undone.
    """

    code = "measurement_failed"
    remedy = "Read the log lines in the message. On a busy machine, measure fewer tasks."


class PeersMissing(CeleriacError):
    """The other systems of the comparison are not installed: run `make bench-peers`, or pass --without-peers.

    `manage.py bench ingest` compares Celeriac with other systems, which have a virtual environment of their own.
    """

    code = "peers_missing"
    remedy = "Run `make bench-peers` once, or pass `--without-peers`."


@dataclass(frozen=True, slots=True)
class Place:
    """A folder for the gate and the logs of one measurement, and the environment of its programs."""

    folder: Path
    foreign: bool = False  # use the Python of .venv-bench
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        ours = {GATE: str(self.folder), "PYTHONPATH": str(ROOT), "REMAP_SIGTERM": "SIGQUIT"}  # workers stop at once
        return {**os.environ, **ours, **self.variables}

    def command(self, module: str, arguments: Sequence[Any]) -> list[str]:
        python = str(PEERS_PYTHON) if self.foreign else sys.executable
        return [python, "-m", f"bench.peers.{module}", *map(str, arguments)]

    def await_all(self, running: Sequence[ChildProcess]) -> None:
        """Wait until every process is at the gate."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while sum(path.name.isdecimal() for path in self.folder.iterdir()) < PROCESSES:
            self.require_alive(running)
            if time.monotonic() > deadline:
                raise MeasurementFailed(f"The worker processes took no task. {self.last_output()}")
            time.sleep(0.02)

    def open_gate(self) -> None:
        (self.folder / "open").touch()

    def require_alive(self, running: Sequence[ChildProcess]) -> None:
        for program in running:
            if (code := program.exit_code()) is not None:
                raise MeasurementFailed(f"A worker ended with code {code}. {self.last_output()}")

    def start(self, name: str, module: str, arguments: Sequence[Any], **popen_options: Any) -> ChildProcess:
        return ChildProcess(
            module,
            self.command(module, arguments),
            log=self.folder / f"{name}.log",
            ready_file=self.folder / f"{name}.ready",
            environment=self.environment,
            cwd=ROOT,
            popen_options=popen_options,
        )

    def last_output(self) -> str:
        return " ".join(path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("*.log")))


def require_peers() -> None:
    """Raise PeersMissing if one of the other systems is not installed."""
    imports = f"import {', '.join(FOREIGN)}"
    if not PEERS_PYTHON.exists() or subprocess.run([PEERS_PYTHON, "-c", imports], check=False).returncode:
        raise PeersMissing


def answer(place: Place, module: str, *arguments: Any) -> Any:
    """Run a program to its end and return its answer."""
    with answering(place, module, *arguments) as program:
        return read_answer(program)


@contextmanager
def answering(place: Place, module: str, *arguments: Any) -> Iterator[ChildProcess]:
    """Run a program beside the block; `read_answer` waits for its answer."""
    name = f"{module}-{arguments[0]}"
    with (place.folder / f"{name}.log").open("ab") as log:
        program = place.start(name, module, arguments, stdout=subprocess.PIPE, stderr=log)
    try:
        yield program
    except MeasurementFailed as error:
        if program.exit_code():
            raise MeasurementFailed(f"{error.message} {place.last_output()}") from None
        raise
    finally:
        program.end()
        assert program.popen.stdout
        program.popen.stdout.close()


def read_answer(program: ChildProcess) -> Any:
    output, _ = program.popen.communicate(timeout=600)
    if code := program.exit_code():
        raise MeasurementFailed(f"{program.name} ended with code {code}.")
    return json.loads(output)


@contextmanager
def working(
    place: Place, module: str, width: int, programs: int, command: str = "work"
) -> Iterator[list[ChildProcess]]:
    """Run as many worker programs as make two processes, until the end of the block."""
    running: list[ChildProcess] = []
    try:
        for number in range(programs):
            running.append(place.start(f"{module}-work-{number}", module, (command, width, number)))
        yield running
    finally:
        end_all(running)
