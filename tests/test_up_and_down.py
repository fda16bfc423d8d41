"""The whole stack as a new user starts it: `manage.py up`, its programs, `manage.py down`, in a home of its own."""

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
from sqlalchemy import create_engine

from child_process import OwnProcess
from embedded.home import Home
from embedded.roles import PORTS, ROLES, SERVER_ROLES
from settings import ROOT
from tests.servers import wait_until
from tests.tasks.celery_settings import application

pytestmark = pytest.mark.timeout(180)


class User:
    """Runs commands in one home.

    Its ports are its own: a stack of another test process could otherwise take a default port while this one is down.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        first = 20_000 + 20 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        own = Home(home)
        own.create()
        own.ports({role: first + place for place, role in enumerate(PORTS)}, wished={})
        # many shells set these for other servers
        others = {"http_proxy": "http://127.0.0.1:9", "PGSSLMODE": "require"}
        self.environment = dict(os.environ) | others | {"CELERIAC_HOME": str(home), "LOG_FORMAT": "json"}

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
        """Return what `manage.py ps` prints, without the second that starting it takes."""
        files = (self.home / "run").glob("*.pid")
        return {path.stem: int(path.read_text().split()[0]) for path in files}

    def addresses(self) -> dict[str, str]:
        return dict(json.loads((self.home / "stack.json").read_text()))

    def exports(self) -> dict[str, str]:
        lines = self.manage("env").splitlines()
        return dict(line.removeprefix("export ").split("=", 1) for line in lines)

    def workers(self) -> set[str]:
        """Return the first half of the names of the workers that answer a ping."""
        with application(self.addresses()["BROKER_URL"]) as app:
            answers = app.control.ping(timeout=1, limit=2) or []
        return {name.partition("@")[0] for answer in answers for name in answer}

    def processes(self) -> list[OwnProcess]:
        """Return every process whose environment names this home."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("CELERIAC_HOME") == str(self.home) and process.pid != os.getpid():
                    found.append(OwnProcess.of(process.pid))
            except psutil.Error:
                continue
        return found


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    folder = Path(tempfile.mkdtemp(prefix="celeriac up "))
    made = User(folder / "home")
    yield made
    made.manage("down")
    shutil.rmtree(folder)


@pytest.fixture
def running(user: User) -> User:
    """Start the stack unless an earlier test has."""
    if not (user.home / "run" / "supervisor.ready").exists():
        user.manage("up", "-d")
    return user


def get(url: str, *, login: str = "") -> tuple[int, str]:
    request = urllib.request.Request(url)
    if login:
        request.add_header("Authorization", f"Basic {b64encode(login.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, ""


def test_one_command_starts_everything_and_prints_the_addresses(user: User) -> None:
    said = user.manage("up", "-d", "-v")
    assert user.pids().keys() == {"supervisor", *ROLES}
    shown = {line["role"]: line for line in json.loads(user.manage("ps", "--json"))}
    assert user.pids() == {role: line["pid"] for role, line in shown.items()}
    exports = user.exports()
    assert shown["postgres"]["address"] == f"127.0.0.1:{exports['PGPORT']}"
    assert shown["api"]["address"] == exports["API_URL"]
    assert "token create" in shown["api"]["login"]
    for role, key in (
        ("postgres", "postgres"),
        ("redis-broker", "redis"),
        ("redis-receipts", "redis"),
        ("flower",) * 2,
    ):
        assert shown[role]["address"] in said
        assert f"`{key}` in {user.home / 'secrets.json'}" in shown[role]["login"]
    assert list(exports)[:4] == ["DATABASE_URL", "BROKER_URL", "REDIS_URL", "API_URL"]
    assert exports["API_URL"] in said
    assert 'eval "$(./manage.py env)"' in said
    secrets = json.loads((user.home / "secrets.json").read_text())
    assert secrets["flower"] in said
    for hidden in ("postgres", "redis"):
        assert secrets[hidden] not in said
    assert not [secret for secret in secrets.values() if secret in str(shown)]


def test_the_printed_addresses_work_as_they_are_in_sqlalchemy_and_libpq(running: User) -> None:
    exports = running.exports()
    engine = create_engine(exports["DATABASE_URL"])
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT id, status FROM ingest_task")
    engine.dispose()
    for_psql = {name: value for name, value in exports.items() if name.startswith("PG")}
    assert set(for_psql) == {"PGHOST", "PGPORT", "PGUSER", "PGPASSWORD", "PGDATABASE"}
    connect = "import psycopg2; psycopg2.connect('').cursor().execute('SELECT id, status FROM ingest_task')"
    subprocess.run([sys.executable, "-c", connect], env=for_psql, check=True)


def test_the_api_answers_and_refuses_strangers(running: User) -> None:
    api = running.addresses()["API_URL"]
    assert get(f"{api}/healthz") == (200, '{"status":"ok"}')
    assert get(f"{api}/readyz") == (200, '{"status":"ready"}')
    assert get(f"{api}/metrics")[0] == 200
    assert get(f"{api}/docs")[0] == 200
    assert get(f"{api}/api/tasks")[0] == 401, "everything but pages and probes needs a token"


def test_flower_requires_the_generated_login(running: User) -> None:
    flower = running.addresses()["FLOWER_URL"]
    secret = json.loads((running.home / "secrets.json").read_text())["flower"]
    assert get(flower)[0] == 401
    status, page = get(flower, login=f"celeriac:{secret}")
    assert status == 200
    assert "Flower" in page


def test_with_log_format_json_every_line_of_every_program_of_ours_is_json(running: User) -> None:
    assert get(f"{running.addresses()['API_URL']}/healthz")[0] == 200
    logs = {role: running.home / "log" / f"{role}.log" for role in ROLES if role not in SERVER_ROLES}

    def lines(role: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in logs[role].read_text().splitlines()]

    wait_until(lambda: all(map(lines, logs)), "every program has logged something")
    for role in logs:
        assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines(role)), role
    wait_until(lambda: any("/healthz" in line["message"] for line in lines("api")), "the API has logged a request")


def test_two_workers_answer_a_ping(running: User) -> None:
    wait_until(lambda: running.workers() == {"ingest", "system"}, "both workers answer")


def test_everything_listens_on_loopback_only(running: User) -> None:
    own = {process.pid for process in running.processes()}
    own |= set(running.pids().values())  # PostgreSQL overwrites its environment
    listening = [found for found in psutil.net_connections("inet") if found.pid in own and found.status == "LISTEN"]
    assert len(listening) >= 5
    assert {connection.laddr.ip for connection in listening if connection.laddr} == {"127.0.0.1"}


def test_a_second_up_reports_the_running_stack(running: User) -> None:
    before = running.pids()
    for command in (("up", "-d"), ("up",)):
        assert "A stack is already running" in running.manage(*command)
    assert running.pids() == before


def test_a_program_that_dies_is_restarted(running: User) -> None:
    before = running.pids()
    os.kill(before["worker"], signal.SIGKILL)
    wait_until(lambda: running.pids().get("worker") not in (None, before["worker"]), "the worker was restarted")
    after = running.pids()
    assert {role: pid for role, pid in after.items() if role != "worker"} == {
        role: pid for role, pid in before.items() if role != "worker"
    }
    wait_until(lambda: "ingest" in running.workers(), "the new worker answers")


def test_the_checks_of_a_fresh_stack_find_no_problem(running: User) -> None:
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


def test_up_after_a_killed_supervisor_replaces_all_its_programs(running: User) -> None:
    addresses, before = running.addresses(), running.pids()
    orphans = running.processes()
    OwnProcess.of(before["supervisor"]).kill()
    running.manage("up", "-d")
    after = running.pids()
    assert not set(before.values()) & set(after.values())
    assert not any(process.is_alive() for process in orphans)
    assert running.addresses() == addresses
    assert get(f"{addresses['API_URL']}/readyz")[0] == 200


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
