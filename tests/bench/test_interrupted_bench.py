"""Test that a bench shows its progress in a file, and that a signal at any time ends all its programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from child_process import OwnProcess
from settings import ROOT
from tests.servers import wait_until


@contextmanager
def bench(folder: Path, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a bench whose temporary files are in `folder`, and which writes to a file."""
    command = [sys.executable, str(ROOT / "manage.py"), "bench", "ingest", "--without-peers", "--count", "1000"]
    with output.open("wb") as file:
        environment = {**os.environ, "TMPDIR": str(folder)}
        started = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        for process in programs(folder):  # only if the test failed
            process.kill()


def programs(folder: Path) -> dict[OwnProcess, str]:
    """Return the programs that a bench has started, with their command lines."""
    found = {}
    for process in psutil.process_iter(["cmdline", "environ"]):
        if (process.info["environ"] or {}).get("TMPDIR", "").startswith(f"{folder}/"):
            found[OwnProcess.of(process.pid)] = " ".join(process.info["cmdline"] or ())
    return found


def test_a_terminated_bench_has_shown_its_progress_and_leaves_nothing_behind(temporary: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with bench(temporary, output) as started:
        seen: dict[OwnProcess, str] = {}

        def works() -> bool:
            seen.update(programs(temporary))
            return all(
                any(part in line for line in seen.values()) for part in ("postgres -D", "redis", "plain_celery work")
            )

        wait_until(works, "PostgreSQL, Redis and a worker run")
        assert started.poll() is None
        assert "s  plain Celery, prefetch 1: 1,000 tasks …\n" in output.read_text()
        started.send_signal(signal.SIGTERM)
        assert started.wait(30) == 128 + signal.SIGTERM
    assert [line for process, line in seen.items() if process.is_alive()] == []
    assert programs(temporary) == {}
    assert list(temporary.iterdir()) == []
    assert "Traceback" not in output.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_bench_that_is_interrupted_while_its_servers_start_leaves_nothing_behind(
    number: signal.Signals, temporary: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    with bench(temporary, output) as started:
        wait_until(lambda: programs(temporary), "the first program starts")
        started.send_signal(number)
        assert started.wait(30) == 128 + number
    assert programs(temporary) == {}
    assert list(temporary.iterdir()) == []
    assert "Traceback" not in output.read_text()
