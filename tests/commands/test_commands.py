"""manage.py: every command has a useful help, and failures are one sentence with the right exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from typer.testing import CliRunner

import commands
from settings import ROOT
from tests.servers import Cluster

ROOT_COMMAND: Any = typer.main.get_command(commands.app)
CONTRACT = {
    "up", "down", "ps", "env", "migrate", "check", "stats", "submit", "tasks", "show", "retry-now", "requeue-dead",
    "discard-dead", "relay", "reclaim", "rebuild-broker", "outbox", "documents", "ingest", "search", "token", "bench",
    "handlers",
}  # fmt: skip
INTERNAL_WORDS = re.compile(r"\b(claims?|leases?|guard|fence|settles?|ring|isolated|charged)\b", re.I)


def manage(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "manage.py"), *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


def every_help(command: Any, *path: str) -> Iterator[tuple[str, str]]:
    """Yield each command below `command` with its help text."""
    for name, subcommand in getattr(command, "commands", {}).items():
        here = (*path, name)
        yield " ".join(here), CliRunner().invoke(commands.app, [*here, "--help"]).output
        yield from every_help(subcommand, *here)


def test_every_command_has_a_help_with_an_example_and_without_internal_words() -> None:
    helps = dict(every_help(ROOT_COMMAND))
    assert set(helps) >= CONTRACT
    assert [name for name, text in helps.items() if not re.search(r"Example:.*manage\.py", text)] == []
    assert [name for name, text in helps.items() if "<bool>" in text] == []
    assert [(name, found[0]) for name, text in helps.items() if (found := INTERNAL_WORDS.search(text))] == []


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(commands.app, ["--version"]).output == f"Celeriac {commands.VERSION}\n"


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "sentence"),
    [
        (["env"], {}, 3, "run `make up`, or set DATABASE_URL, BROKER_URL and REDIS_URL"),
        (["migrate"], {}, 3, "run `make up`"),
        (["migrate"], {"DATABASE_URL": "postgresql://me:hunter2@127.0.0.1:1/x"}, 3, "127.0.0.1:1 is unreachable"),
        (["ps"], {"INGEST_MAX_ATTEMPTS": "ten"}, 1, "INGEST_MAX_ATTEMPTS"),
        (["nonsense"], {}, 2, "No such command"),
        (["migrate", "--lock-timeout", "soon"], {}, 2, "lock-timeout"),
    ],
)
def test_a_failure_is_one_sentence_with_its_exit_code(
    arguments: list[str], variables: dict[str, str], code: int, sentence: str
) -> None:
    done = manage(*arguments, **variables)
    assert done.returncode == code
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert "hunter2" not in done.stderr


def test_dropping_all_tables_needs_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://me@127.0.0.1:1/x")
    refused = CliRunner().invoke(commands.app, ["migrate", "base"], input="n\n")
    assert refused.exit_code == 1
    assert "drops every table" in refused.output


def test_config_does_not_print_passwords() -> None:
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
def test_config_masks_a_password_anywhere_in_an_address(url: str) -> None:
    assert "hunter2" not in manage("config", "--json", DATABASE_URL=url).stdout


def test_any_python_continues_with_the_python_of_venv(tmp_path: Path) -> None:
    (tmp_path / "manage.py").write_text((ROOT / "manage.py").read_text())
    fake = tmp_path / ".venv" / "bin" / "python"
    fake.parent.mkdir(parents=True)
    fake.write_text('#!/bin/sh\necho "continued with $*"\n')
    fake.chmod(0o755)
    bare = Path(sys.base_prefix) / "bin" / "python3"
    said = subprocess.run([bare, str(tmp_path / "manage.py"), "ps"], capture_output=True, text=True, check=True)
    assert said.stdout == f"continued with {tmp_path / 'manage.py'} ps\n"


def test_an_error_of_the_database_is_one_sentence(empty_database: str, postgres: Cluster) -> None:
    name = empty_database.rpartition("/")[2].partition("?")[0]
    with postgres.admin.connect() as admin:
        admin.exec_driver_sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    done = manage("migrate", DATABASE_URL=empty_database)
    assert done.returncode == 1
    assert "The database refused: " in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_packages_are_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "manage.py").write_text((ROOT / "manage.py").read_text())
    bare = Path(sys.base_prefix) / "bin" / "python3"
    said = subprocess.run([bare, "-S", str(tmp_path / "manage.py")], capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert "run `make up` once" in said.stderr
