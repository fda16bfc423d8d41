"""`ps` and `up` show where every part of the stack is and where its login is kept, and no password."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from child_process import OwnProcess
from embedded.background import parts
from embedded.home import Home
from embedded.roles import PORTS, ROLES
from embedded.stack import plan
from settings import ROOT, Settings


def test_the_api_listens_on_the_address_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"API_HOST": "127.0.0.2", "API_PORT": "23999", "CELERIAC_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    current = Settings()
    home = Home(current.home)
    home.create()
    planned = plan(home, current)
    assert planned.addresses["API_URL"] == "http://127.0.0.2:23999"
    (api,) = (program for program in planned.programs if program.role == "api")
    assert {"--host=127.0.0.2", "--port=23999"} <= set(api.command)


def test_every_part_that_listens_has_an_address_and_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "DATABASE_URL": "postgresql://me:hunter2@db.example:5432/x",
        "BROKER_URL": "amqp://me:hunter2@rabbit.example//",
        "INGEST_QUEUE": "kafka",
        "KAFKA_BOOTSTRAP_SERVERS": "kafka.example:9092",
        "WORKER_METRICS_PORT": "9100",
        "CELERIAC_HOME": str(tmp_path / "home"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    current = Settings()
    home = Home(current.home)
    home.create()
    home.write_stack(plan(home, current).addresses)
    assert parts(current) == [], "nothing runs"
    started = [role for role in ROLES if role not in ("postgres", "redis-broker")]
    for role in started:
        OwnProcess.of(os.getpid()).write(home.pid_file(role))
    for name in variables.keys() - {"CELERIAC_HOME"}:
        monkeypatch.delenv(name)
    shown = {line.role: line for line in parts(Settings())}
    assert list(shown) == [*started, "postgres", "broker", "kafka"]
    assert {(line.address, line.login, line.status) for line in list(shown.values())[-3:]} == {
        ("db.example:5432", "DATABASE_URL", "external"),
        ("rabbit.example", "BROKER_URL", "external"),
        ("kafka.example:9092", "KAFKA_OPTIONS", "external"),
    }
    assert shown["worker"].address == "http://127.0.0.1:9100/metrics"
    assert shown["system"].address == "http://127.0.0.1:9101/metrics"
    assert shown["receipts"].address == "http://127.0.0.1:9102/metrics"
    assert [role for role, line in shown.items() if not line.address] == ["beat"]
    assert all(bool(line.address) == bool(line.login) for line in shown.values())
    assert "hunter2" not in str(shown)
    assert not [secret for secret in home.secrets.values() if secret in str(shown)]


def test_the_runbook_names_the_default_port_of_every_part() -> None:
    section = (
        (ROOT / "docs" / "operations.md")
        .read_text()
        .partition("## The stack on one machine\n")[2]
        .partition("\n## ")[0]
    )
    assert {str(port) for port in PORTS.values()} == set(re.findall(r"\b\d{4,5}\b", section))
