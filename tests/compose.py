"""docker-compose.yml as its tests see it, and how they run what it names."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from settings import ROOT

COMPOSE: Final[dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: Final[dict[str, Any]] = COMPOSE["services"]
OURS: Final = {name: service for name, service in SERVICES.items() if "build" in service}
BIN: Final = Path(sys.executable).parent


def is_pinned(image: str) -> bool:
    """A tag with a whole version: `18` and `3.12-slim` move."""
    name, _, tag = image.partition(":")
    return re.match(r"\d+\.\d+\.\d+\b" if name != "postgres" else r"\d+\.\d+\b", tag) is not None


@contextmanager
def running(command: list[str], environment: Mapping[str, str] | None = None) -> Iterator[int]:
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | dict(environment or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(command: list[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | dict(environment or {}), capture_output=True, text=True, check=False
    )
