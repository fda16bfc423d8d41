"""docker-compose.yml for its tests, and how they run its commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from child_process import ChildProcess
from settings import ROOT

COMPOSE: Final[dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: Final[dict[str, Any]] = COMPOSE["services"]
for _service in SERVICES.values():  # commands as they are without variables of the user
    if isinstance(_service.get("command"), list):
        _service["command"] = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in _service["command"]]
OURS: Final = {name: service for name, service in SERVICES.items() if "build" in service}
MONITORING: Final = {name: service for name, service in SERVICES.items() if "profiles" in service}
BIN: Final = Path(sys.executable).parent


def is_pinned(image: str) -> bool:
    """Return whether the tag is a full version; `18` and `3.12-slim` change over time."""
    name, _, tag = image.partition(":")
    return re.match(r"v?\d+\.\d+\.\d+\b" if name != "postgres" else r"\d+\.\d+\b", tag) is not None


@contextmanager
def running(command: list[str], environment: Mapping[str, str] | None = None) -> Iterator[int]:
    """Run a command until the end of the block. Yield its pid."""
    variables = os.environ | dict(environment or {})
    process = ChildProcess(command[0], command, log=Path(os.devnull), environment=variables, cwd=ROOT)
    try:
        yield process.pid
    finally:
        process.end(20)


def run(command: list[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | dict(environment or {}), capture_output=True, text=True, check=False
    )


def find_compose() -> list[str]:
    """Return the command of Compose, or skip the test."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker") and run(["docker", "compose", "version"]).returncode == 0:
        return ["docker", "compose"]
    pytest.skip("docker-compose is not installed")
