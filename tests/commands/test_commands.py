"""The door: every command explains itself with an example, and fails in sentences with the right code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import typer.main
from typer.testing import CliRunner

import commands
from commands.config import configuration_page
from settings import ROOT
from tests.servers import Cluster

NAMES = sorted(set(typer.main.get_command(commands.app).commands) - {"bench"})  # type: ignore[attr-defined]


def manage(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "manage.py"), *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_a_help_with_an_example(name: str) -> None:
    shown = CliRunner().invoke(commands.app, [name, "--help"])
    assert shown.exit_code == 0
    assert "Example:" in shown.output
    assert "manage.py" in shown.output


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "sentence"),
    [
        (["env"], {}, 3, "run `make up`, or set DATABASE_URL, BROKER_URL and REDIS_URL"),
        (["migrate"], {}, 3, "run `make up`"),
        (["migrate"], {"DATABASE_URL": "postgresql://me:hunter2@127.0.0.1:1/x"}, 3, "127.0.0.1:1 cannot be reached"),
        (["ps"], {"INGEST_MAX_ATTEMPTS": "ten"}, 1, "INGEST_MAX_ATTEMPTS"),
        (["nonsense"], {}, 2, "No such command"),
        (["migrate", "--lock-timeout", "soon"], {}, 2, "lock-timeout"),
    ],
)
def test_a_failure_is_a_sentence_with_its_exit_code(
    arguments: list[str], variables: dict[str, str], code: int, sentence: str
) -> None:
    done = manage(*arguments, **variables)
    assert done.returncode == code
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert "hunter2" not in done.stderr


def test_going_back_to_nothing_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://me@127.0.0.1:1/x")
    refused = CliRunner().invoke(commands.app, ["migrate", "base"], input="n\n")
    assert refused.exit_code == 1
    assert "drops every table" in refused.output


def test_config_shows_no_password() -> None:
    secret = "hunter2"
    variables = {"DATABASE_URL": f"postgresql://me:{secret}@127.0.0.1:1/x", "LLM_API_KEY": secret}
    shown = manage("config", **variables)
    assert shown.returncode == 0
    assert secret not in shown.stdout + shown.stderr
    assert "postgresql://me:***@127.0.0.1:1/x" in shown.stdout


@pytest.mark.parametrize(
    "url",
    ["postgresql://me:hunter2@h/d", "postgresql://me:hun@hunter2@h/d", "postgresql://h/d?user=me&password=hunter2"],
)
def test_config_masks_passwords_wherever_they_stand(url: str) -> None:
    assert "hunter2" not in manage("config", "--json", DATABASE_URL=url).stdout


def test_the_page_of_the_settings_is_not_stale() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == configuration_page(), "run `make docs`"


def test_any_python_continues_with_the_projects_own(tmp_path: Path) -> None:
    """A Python outside a virtual environment finds .venv beside manage.py."""
    (tmp_path / "manage.py").write_text((ROOT / "manage.py").read_text())
    fake = tmp_path / ".venv" / "bin" / "python"
    fake.parent.mkdir(parents=True)
    fake.write_text('#!/bin/sh\necho "continued with $*"\n')
    fake.chmod(0o755)
    bare = Path(sys.base_prefix) / "bin" / "python3"
    said = subprocess.run([bare, str(tmp_path / "manage.py"), "ps"], capture_output=True, text=True, check=True)
    assert said.stdout == f"continued with {tmp_path / 'manage.py'} ps\n"


def test_a_refusal_of_the_database_is_a_sentence(empty_database: str, postgres: Cluster) -> None:
    name = empty_database.rpartition("/")[2].partition("?")[0]
    with postgres.admin.connect() as admin:
        admin.exec_driver_sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    done = manage("migrate", DATABASE_URL=empty_database)
    assert done.returncode == 1
    assert "The database refused: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_environment_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "manage.py").write_text((ROOT / "manage.py").read_text())
    bare = Path(sys.base_prefix) / "bin" / "python3"
    said = subprocess.run([bare, "-S", str(tmp_path / "manage.py")], capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert "run `make up` once" in said.stderr


def test_commands_are_those_of_the_design() -> None:
    assert {"up", "down", "ps", "env", "migrate", "check"} <= set(NAMES)
    assert typer.main.get_command(commands.app) is not None
