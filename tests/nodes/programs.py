"""Run programs as a user would: in the folder of the project, without variables that tests have set."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from settings import ROOT

_NOT_INHERITED = ("PYTHONPATH", "REMAP_SIGTERM", "PROMETHEUS_MULTIPROC_DIR", "CELERIAC_METRICS_DIR")


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of this process, from which `tests.isolation` has removed the addresses of servers."""
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return inherited | variables


def celery(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("celery")), *arguments]


def start(command: list[str], **variables: str) -> subprocess.Popen[str]:
    """Start a program without waiting for it."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], *, seconds: float = 30) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a program, and kill it if it does not end in time."""
    try:
        said, complained = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, said, complained)


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    with start(command, **variables) as process:
        return finish(process)
