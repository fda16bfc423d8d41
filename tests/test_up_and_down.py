"""The whole stack as a newcomer sees it: `manage.py up`, look around, `manage.py down`. Real programs, an own home."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from embedded.process import Process
from embedded.roles import ROLES
from settings import ROOT
from tests.servers import wait_until

pytestmark = pytest.mark.timeout(180)


class Newcomer:
    """Types commands for one home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        # what is set in many a shell, and is about other servers than ours
        others = {"http_proxy": "http://127.0.0.1:9", "PGSSLMODE": "require"}
        self.environment = dict(os.environ) | others | {"CELERIAC_HOME": str(home)}

    def manage(self, *arguments: str, code: int = 0, variables: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), *arguments],
            env=self.environment | (variables or {}),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def pids(self) -> dict[str, int]:
        return {line["role"]: line["pid"] for line in json.loads(self.manage("ps", "--json"))}

    def exports(self) -> dict[str, str]:
        lines = self.manage("env").splitlines()
        return dict(line.removeprefix("export ").split("=", 1) for line in lines)

    def workers(self) -> set[str]:
        """That answer a ping, by the first half of their names."""
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "tasks", "inspect", "ping", "-t", "1", "--json"],
            cwd=ROOT,
            env=self.environment | {"BROKER_URL": self.exports()["BROKER_URL"]},
            capture_output=True,
            text=True,
            check=False,
        )
        answers: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        return {name.partition("@")[0] for name in answers}

    def families(self) -> list[Process]:
        """Every process of this home: all carry its address."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("CELERIAC_HOME") == str(self.home) and process.pid != os.getpid():
                    found.append(Process.of(process.pid))
            except psutil.Error:
                continue
        return found


@pytest.fixture(scope="module")
def newcomer() -> Iterator[Newcomer]:
    folder = Path(tempfile.mkdtemp(prefix="celeriac up "))
    someone = Newcomer(folder / "home")
    yield someone
    someone.manage("down")
    shutil.rmtree(folder)


@pytest.fixture
def running(newcomer: Newcomer) -> Newcomer:
    """Started by the first test that needs it."""
    if not (newcomer.home / "run" / "supervisor.ready").exists():
        newcomer.manage("up", "-d")
    return newcomer


def get(url: str, *, login: str = "") -> tuple[int, str]:
    request = urllib.request.Request(url)
    if login:
        request.add_header("Authorization", f"Basic {b64encode(login.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, ""


def test_one_command_starts_everything_and_says_where_it_is(newcomer: Newcomer) -> None:
    said = newcomer.manage("up", "-d")
    assert newcomer.pids().keys() == {"supervisor", *ROLES}
    exports = newcomer.exports()
    assert list(exports) == ["DATABASE_URL", "BROKER_URL", "REDIS_URL", "API_URL"]
    assert exports["API_URL"] in said
    assert 'eval "$(./manage.py env)"' in said
    secrets = json.loads((newcomer.home / "secrets.json").read_text())
    assert secrets["flower"] in said
    for hidden in ("postgres", "redis"):
        assert secrets[hidden] not in said


def test_the_api_answers(running: Newcomer) -> None:
    api = running.exports()["API_URL"]
    assert get(f"{api}/healthz") == (200, '{"status":"ok"}')
    assert get(f"{api}/readyz") == (200, '{"status":"ready"}')
    assert get(f"{api}/metrics")[0] == 200
    assert get(f"{api}/docs")[0] == 401, "whatever a stranger asks for"


def test_flower_asks_for_the_generated_login(running: Newcomer) -> None:
    flower = json.loads((running.home / "stack.json").read_text())["FLOWER_URL"]
    secret = json.loads((running.home / "secrets.json").read_text())["flower"]
    assert get(flower)[0] == 401
    status, page = get(flower, login=f"celeriac:{secret}")
    assert status == 200
    assert "Flower" in page


def test_two_workers_answer_a_ping(running: Newcomer) -> None:
    wait_until(lambda: running.workers() == {"ingest", "system"}, "both answer")


def test_everything_listens_on_loopback_only(running: Newcomer) -> None:
    own = {process.pid for process in running.families()} | set(running.pids().values())  # PostgreSQL hides its own
    listening = [found for found in psutil.net_connections("inet") if found.pid in own and found.status == "LISTEN"]
    assert len(listening) >= 5
    assert {connection.laddr.ip for connection in listening if connection.laddr} == {"127.0.0.1"}


def test_a_second_up_finds_the_running_stack_and_says_so(running: Newcomer) -> None:
    before = running.pids()
    for command in (("up", "-d"), ("up",)):
        assert "A stack already runs" in running.manage(*command)
    assert running.pids() == before


def test_a_part_that_dies_is_started_again(running: Newcomer) -> None:
    before = running.pids()
    os.kill(before["worker"], signal.SIGKILL)
    wait_until(lambda: running.pids().get("worker") not in (None, before["worker"]), "the worker is back")
    after = running.pids()
    assert {role: pid for role, pid in after.items() if role != "worker"} == {
        role: pid for role, pid in before.items() if role != "worker"
    }
    wait_until(lambda: "ingest" in running.workers(), "the new worker answers")


def test_the_doctor_finds_nothing(running: Newcomer) -> None:
    def findings() -> list[dict[str, str]]:
        done = subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), "check", "--json"],
            env=running.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return list(json.loads(done.stdout))

    found: list[dict[str, str]] = []

    def beat_was_seen() -> bool:
        found[:] = findings()
        return any(finding["name"] == "beat" and finding["level"] == "ok" for finding in found)

    wait_until(beat_was_seen, "beat was seen")
    assert [finding for finding in found if finding["level"] != "ok"] == []


def test_a_killed_supervisor_leaves_a_state_that_the_next_up_repairs(running: Newcomer) -> None:
    addresses, before = running.exports(), running.pids()
    orphans = running.families()
    Process.of(before["supervisor"]).kill()
    running.manage("up", "-d")
    after = running.pids()
    assert not set(before.values()) & set(after.values())
    assert not any(process.is_alive() for process in orphans)
    assert running.exports() == addresses
    assert get(f"{addresses['API_URL']}/readyz")[0] == 200


def test_down_leaves_no_process_and_up_works_again_in_a_shell_that_evaluated_env(running: Newcomer) -> None:
    shell = running.exports()
    parts = running.families()
    assert "Stopped" in running.manage("down", variables=shell)
    assert not any(process.is_alive() for process in parts)
    assert list((running.home / "run").iterdir()) == []
    assert "No stack runs" in running.manage("down", variables=shell)
    assert "run `make up`" in running.manage("env", code=3, variables=shell)
    with Terminal(running.home, shell) as terminal:
        assert running.exports() == shell
        parts = running.families()
        assert len(parts) > len(ROLES)
        assert terminal.press_ctrl_c() == 0
    assert not any(process.is_alive() for process in parts)


class Terminal:
    """`manage.py up` in a terminal of its own, as it is when everything runs."""

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
        with suppress(OSError):  # the other end closes with the program
            while os.read(self.descriptor, 4096):
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("DATABASE_URL", "postgresql://me:hunter2@127.0.0.1:1/x", "PostgreSQL at 127.0.0.1:1 cannot be reached"),
        ("BROKER_URL", "redis://:hunter2@127.0.0.1:1/0", "BROKER_URL: 127.0.0.1:1 does not answer"),
        ("BROKER_URL", "amqp://me:hunter2@127.0.0.1:1//", "BROKER_URL: 127.0.0.1:1 does not answer"),
        ("REDIS_URL", "redis://:hunter2@127.0.0.1:1/0", "REDIS_URL: 127.0.0.1:1 does not answer"),
    ],
)
def test_a_server_that_does_not_answer_is_one_sentence_and_nothing_is_left_running(
    variable: str, value: str, sentence: str, tmp_path: Path
) -> None:
    unlucky = Newcomer(tmp_path / "home")
    said = unlucky.manage("up", *(["-d"] if variable == "DATABASE_URL" else []), code=3, variables={variable: value})
    assert sentence in said
    assert "hunter2" not in said
    assert len(said.strip().splitlines()) == 1
    assert unlucky.families() == []


@pytest.mark.slow
def test_an_up_during_a_down_waits_for_its_end_and_a_copied_home_stops_nothing(newcomer: Newcomer) -> None:
    newcomer.manage("up", "-d")
    before = newcomer.pids()
    copy = Newcomer(newcomer.home.parent / "copy")
    shutil.copytree(newcomer.home, copy.home)
    assert "No stack runs" in copy.manage("down")
    assert newcomer.pids() == before
    with subprocess.Popen([sys.executable, str(ROOT / "manage.py"), "down"], env=newcomer.environment) as down:
        wait_until(lambda: not (newcomer.home / "run" / "supervisor.ready").exists(), "the stack begins to stop")
        assert "Celeriac runs" in newcomer.manage("up", "-d")
        assert down.wait(60) == 0
    assert newcomer.pids().keys() == {"supervisor", *ROLES}
    newcomer.manage("down")


@pytest.mark.slow
def test_five_rounds_of_up_and_down(newcomer: Newcomer) -> None:
    for _ in range(5):
        newcomer.manage("up", "-d")
        parts = newcomer.families()
        assert "Stopped" in newcomer.manage("down")
        assert not any(process.is_alive() for process in parts)
