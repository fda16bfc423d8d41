"""Child processes are ended with everything they started, and a process that only reuses a pid is never touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from child_process import READY_FILE, ChildProcess, OwnProcess, StartFailed, end_all
from tests.servers import wait_until

TOUCH = f"import os, pathlib, time; pathlib.Path(os.environ['{READY_FILE}']).touch(); "
IGNORE_SIGTERM = "import signal; signal.signal(15, signal.SIG_IGN); "
SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


def start(folder: Path, code: str, name: str = "child") -> ChildProcess:
    command = [sys.executable, "-c", code]
    return ChildProcess(name, command, log=folder / f"{name}.log", ready_file=folder / f"{name}.ready")


def test_a_process_that_reuses_our_pid_gets_no_signal(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    path = tmp_path / "pid"
    OwnProcess(sleeper.pid, "another-boot:1").write(path)
    stale = OwnProcess.read(path)
    assert stale is not None
    assert not stale.is_alive()
    stale.send_signal(signal.SIGKILL)
    stale.kill()
    assert sleeper.poll() is None


def test_a_pid_file_names_the_process_that_wrote_it(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    process = OwnProcess.of(sleeper.pid)
    process.write(tmp_path / "pid")
    assert OwnProcess.read(tmp_path / "pid") == process
    assert process.is_alive()
    (tmp_path / "pid").write_text("not a pid")
    assert OwnProcess.read(tmp_path / "pid") is None
    assert OwnProcess.read(tmp_path / "none") is None


@pytest.mark.parametrize("is_urgent", [False, True])
def test_a_process_that_ignores_sigterm_is_killed_when_time_is_over_or_the_end_is_urgent(
    is_urgent: bool, tmp_path: Path
) -> None:
    child = start(tmp_path, IGNORE_SIGTERM + TOUCH + SLEEP)
    child.await_ready()
    child.process.send_signal(signal.SIGTERM)
    assert child.process.wait_or_kill(60 if is_urgent else 0.1, is_urgent=lambda: is_urgent) is False
    assert not child.process.is_alive()
    assert child.exit_code() == -signal.SIGKILL


def test_ending_a_child_ends_descendants_that_left_its_process_group(tmp_path: Path) -> None:
    spawn = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True); "
    child = start(tmp_path, spawn + TOUCH + SLEEP)
    child.await_ready()
    family = OwnProcess.with_variable(READY_FILE, str(tmp_path / "child.ready"))
    assert len(family) == 2
    child.end()
    assert not any(process.is_alive() for process in family)
    assert not (tmp_path / "child.ready").exists()


def test_several_children_share_one_deadline(tmp_path: Path) -> None:
    children = [start(tmp_path, IGNORE_SIGTERM + TOUCH + SLEEP, f"child-{number}") for number in range(5)]
    for child in children:
        child.await_ready()
    began_at = time.monotonic()
    end_all(children, 1)
    assert time.monotonic() - began_at < 4
    assert [child.exit_code() for child in children] == [-signal.SIGKILL] * 5


def test_orphans_of_a_killed_parent_are_found_by_the_variable_they_inherited() -> None:
    value = f"orphan-of-{os.getpid()}"
    spawn = "import subprocess; subprocess.Popen(['sleep', '60'])"
    subprocess.run([sys.executable, "-c", spawn], env=os.environ | {"VARIABLE_OF_TEST": value}, check=True)
    (orphan,) = OwnProcess.with_variable("VARIABLE_OF_TEST", value)
    orphan.kill()
    wait_until(lambda: not orphan.is_alive(), "the orphan ends")
    assert OwnProcess.with_variable("VARIABLE_OF_TEST", value) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('disk full'); raise SystemExit(7)", "child ended with code 7:\ndisk full"),
        ("import time; print('still loading', flush=True); time.sleep(60)", "child was not ready after 1 s:\nstill"),
    ],
)
def test_a_child_that_does_not_become_ready_fails_with_the_end_of_its_own_log(
    code: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "child.log").write_text("words of an earlier run\n")
    child = start(tmp_path, code)
    with pytest.raises(StartFailed, match=message):
        child.await_ready(1)
    child.kill()
    assert "earlier" not in child.output()
