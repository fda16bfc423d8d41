"""The programs of a measurement: started with an environment of their own, watched, and ended by their pids."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.peers.effect import GATE, PROCESSES
from models.errors import CeleriacError
from settings import ROOT

PEERS_PYTHON: Final = ROOT / ".venv-bench" / "bin" / "python"
FOREIGN: Final = ("dramatiq", "procrastinate", "pgqueuer")
PATIENCE_SECONDS: Final = 60.0
END_SECONDS: Final = 15.0


class MeasurementFailed(CeleriacError):
    """A measured system did not do its work."""

    code = "measurement_failed"


class PeersMissing(CeleriacError):
    """The peers are not installed: run `make bench-peers` once, or measure with --without-peers."""

    code = "peers_missing"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the programs of one measurement run: a folder for the gate and the logs, and their environment."""

    folder: Path
    foreign: bool = False  # with the Python of the peers
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, GATE: str(self.folder), "PYTHONPATH": str(ROOT), **self.variables}

    def command(self, module: str, arguments: Sequence[Any]) -> list[str]:
        python = str(PEERS_PYTHON) if self.foreign else sys.executable
        return [python, "-m", f"bench.peers.{module}", *map(str, arguments)]

    def await_all(self, running: Sequence[subprocess.Popen[bytes]]) -> None:
        """Until every process stands at the gate."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while sum(path.name.isdecimal() for path in self.folder.iterdir()) < PROCESSES:
            self.require_alive(running)
            if time.monotonic() > deadline:
                raise MeasurementFailed(f"Its processes did not take up their work. {self.last_words()}")
            time.sleep(0.02)

    def open_gate(self) -> None:
        (self.folder / "open").touch()

    def require_alive(self, running: Sequence[subprocess.Popen[bytes]]) -> None:
        for program in running:
            if program.poll() is not None:
                raise MeasurementFailed(f"A worker ended with {program.returncode}. {self.last_words()}")

    def last_words(self) -> str:
        return " ".join(path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("*.log")))


def require_peers() -> None:
    """They are all installed where they belong."""
    imports = f"import {', '.join(FOREIGN)}"
    if not PEERS_PYTHON.exists() or subprocess.run([PEERS_PYTHON, "-c", imports], check=False).returncode:
        raise PeersMissing


def answer(place: Place, module: str, *arguments: Any) -> Any:
    """Run a program to its end; what it says."""
    with speaking(place, module, *arguments) as program:
        return heard(program, module)


@contextmanager
def speaking(place: Place, module: str, *arguments: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A program that does its work while we do ours; `heard` takes its answer."""
    with (place.folder / f"{module}-{arguments[0]}.log").open("wb") as log:
        program = subprocess.Popen(
            place.command(module, arguments),
            cwd=ROOT,
            env=place.environment,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield program
    except BaseException as error:
        if program.poll() and isinstance(error, MeasurementFailed):
            raise MeasurementFailed(f"{error.message} {place.last_words()}") from None
        raise
    finally:
        _end([program])


def heard(program: subprocess.Popen[bytes], module: str) -> Any:
    said, _ = program.communicate(timeout=600)
    if program.returncode:
        raise MeasurementFailed(f"{module} ended with {program.returncode}.")
    return json.loads(said)


@contextmanager
def working(place: Place, module: str, width: int, programs: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Workers, as many programs as it takes to have two processes, until the end of the block."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(programs):
            with (place.folder / f"{module}-work-{number}.log").open("wb") as log:
                running.append(
                    subprocess.Popen(
                        place.command(module, ("work", width, number)),
                        cwd=ROOT,
                        env=place.environment,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        yield running
    finally:
        _end(running)


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Asked first; then what is left of each one's own session is killed."""
    for program in running:
        if program.poll() is None:
            program.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    for program in running:
        with suppress(subprocess.TimeoutExpired):
            program.wait(max(0.1, deadline - time.monotonic()))
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        if program.stdout:
            program.stdout.close()
