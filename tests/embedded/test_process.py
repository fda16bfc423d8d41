"""Only processes that are ours are ended: a pid alone is no proof."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from embedded.process import Process
from tests.servers import wait_until

IGNORES_TERM = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


def test_a_reused_pid_is_never_taken_for_ours(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    path = tmp_path / "pid"
    Process(sleeper.pid, "another-boot:1").write(path)
    stale = Process.read(path)
    assert stale is not None
    assert not stale.is_alive()
    stale.ask_to_end(signal.SIGKILL)
    stale.kill()
    assert sleeper.poll() is None


def test_a_pid_file_is_read_as_it_was_written(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    process = Process.of(sleeper.pid)
    process.write(tmp_path / "pid")
    assert Process.read(tmp_path / "pid") == process
    assert process.is_alive()
    (tmp_path / "pid").write_text("not a pid")
    assert Process.read(tmp_path / "pid") is None
    assert Process.read(tmp_path / "none") is None


def test_a_process_that_does_not_listen_is_killed_after_our_patience() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", IGNORES_TERM], stdout=subprocess.PIPE, start_new_session=True
    ) as stubborn:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        process = Process.of(stubborn.pid)
        process.ask_to_end(signal.SIGTERM)
        assert process.wait_or_kill(0.1) is False
        assert not process.is_alive()


def test_a_second_signal_hurries() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", IGNORES_TERM], stdout=subprocess.PIPE, start_new_session=True
    ) as stubborn:
        process = Process.of(stubborn.pid)
        assert process.wait_or_kill(60, hurry=lambda: True) is False
        assert not process.is_alive()


def test_children_that_a_killed_part_left_behind_are_found_by_their_mark() -> None:
    mark = f"left-behind-{os.getpid()}"
    spawn = "import subprocess; subprocess.Popen(['sleep', '60'])"
    subprocess.run([sys.executable, "-c", spawn], env=os.environ | {"MARK_OF_TEST": mark}, check=True)
    (orphan,) = Process.marked("MARK_OF_TEST", mark)
    orphan.kill()
    wait_until(lambda: not orphan.is_alive(), "the orphan ends")
    assert Process.marked("MARK_OF_TEST", mark) == []
