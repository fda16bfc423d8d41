"""The whole stack as a new user starts it: `manage.py up` and its programs, in a home of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from base64 import b64encode
from typing import Any

import psutil
import pytest
from sqlalchemy import create_engine

from child_process import OwnProcess
from embedded.roles import ROLES, SERVER_ROLES
from settings import ROOT
from tests.servers import wait_until
from tests.stack_user import User

pytestmark = pytest.mark.timeout(180)


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
    assert set(shown["api"]) == {"role", "pid", "status", "uptimeSeconds", "address", "login"}
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


def test_up_prints_a_link_that_logs_in_to_the_console(running: User) -> None:
    api = running.addresses()["API_URL"]
    printed = running.manage("up", "-d")  # it runs already, and prints the same
    (link,) = re.findall(rf"{re.escape(api)}/console/login\?code=[\w-]+", printed)
    status, page = get(link)
    assert status == 200
    assert "This link logs you in once" in page
    assert "This link" not in get(f"{api}/console")[1], "without a session, the console asks for a token"


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
