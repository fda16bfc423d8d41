"""`manage.py down`, Ctrl-C, and an `up` that fails leave no process."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from embedded.roles import ROLES
from settings import ROOT
from tests.servers import wait_until
from tests.stack_user import User

pytestmark = pytest.mark.timeout(180)


def test_down_leaves_no_process_and_up_works_again_in_a_shell_that_evaluated_env(running: User) -> None:
    shell = running.exports()
    processes = running.processes()
    assert "Stopped" in running.manage("down", variables=shell)
    assert not any(process.is_alive() for process in processes)
    assert list((running.home / "run").iterdir()) == []
    assert "No stack is running" in running.manage("down", variables=shell)
    assert "run `make up`" in running.manage("env", code=3, variables=shell)
    with Terminal(running.home, shell) as terminal:
        assert running.exports() == shell
        processes = running.processes()
        assert len(processes) > len(ROLES)
        assert terminal.press_ctrl_c() == 0
    assert not any(process.is_alive() for process in processes)


class Terminal:
    """`manage.py up` in a terminal of its own; entering waits until everything runs."""

    def __init__(self, home: Path, variables: dict[str, str]) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            environment = dict(os.environ) | variables | {"CELERIAC_HOME": str(home)}
            os.execve(sys.executable, [sys.executable, str(ROOT / "manage.py"), "up"], environment)

    def __enter__(self) -> Terminal:
        shown = b""
        while b"logs follow" not in shown:
            shown += os.read(self.descriptor, 4096)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def press_ctrl_c(self) -> int:
        os.write(self.descriptor, b"\x03")
        with suppress(OSError):  # reading fails when the program has closed its end
            while os.read(self.descriptor, 4096):
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("DATABASE_URL", "postgresql://me:hunter2@127.0.0.1:1/x", "PostgreSQL at 127.0.0.1:1 is unreachable"),
        ("BROKER_URL", "redis://:hunter2@127.0.0.1:1/0", "BROKER_URL: 127.0.0.1:1 does not answer"),
        ("BROKER_URL", "amqp://me:hunter2@127.0.0.1:1//", "BROKER_URL: 127.0.0.1:1 does not answer"),
        ("REDIS_URL", "redis://:hunter2@127.0.0.1:1/0", "REDIS_URL: 127.0.0.1:1 does not answer"),
    ],
)
def test_an_unreachable_server_is_reported_as_one_sentence_and_nothing_keeps_running(
    variable: str, value: str, sentence: str, tmp_path: Path
) -> None:
    other = User(tmp_path / "home")
    said = other.manage("up", *(["-d"] if variable == "DATABASE_URL" else []), code=3, variables={variable: value})
    assert sentence in said
    assert "hunter2" not in said
    assert len(said.strip().splitlines()) == 1
    assert other.processes() == []


@pytest.mark.slow
def test_an_up_during_a_down_waits_for_its_end_and_a_copied_home_stops_nothing(user: User) -> None:
    user.manage("up", "-d")
    before = user.pids()
    copy = User(user.home.parent / "copy")
    shutil.copytree(user.home, copy.home)
    assert "No stack is running" in copy.manage("down")
    assert user.pids() == before
    with subprocess.Popen([sys.executable, str(ROOT / "manage.py"), "down"], env=user.environment) as down:
        wait_until(lambda: not (user.home / "run" / "supervisor.ready").exists(), "the stack begins to stop")
        assert "Celeriac is running" in user.manage("up", "-d")
        assert down.wait(60) == 0
    assert user.pids().keys() == {"supervisor", *ROLES}
    user.manage("down")


@pytest.mark.slow
def test_five_rounds_of_up_and_down_leave_no_process(user: User) -> None:
    for _ in range(5):
        user.manage("up", "-d")
        processes = user.processes()
        assert "Stopped" in user.manage("down")
        assert not any(process.is_alive() for process in processes)
