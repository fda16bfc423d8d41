"""manage.py: every command has a useful help, and failures are one sentence with the right exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_group
from typer.testing import CliRunner

import commands
from commands.command_list import COMMANDS
from settings import ROOT
from tests.servers import Cluster

CONTRACT = {
    "up", "down", "ps", "env", "migrate", "check", "stats", "submit", "tasks", "show", "retry-now", "requeue-dead",
    "discard-dead", "relay", "reclaim", "rebuild-broker", "outbox", "documents", "ingest", "search", "token", "bench",
    "handlers",
}  # fmt: skip
LOAD_SLOWLY = {
    "alembic", "celery", "fastapi", "kombu", "opentelemetry", "prometheus_client", "psutil", "psycopg2", "pydantic",
    "redis", "settings", "sqlalchemy", "starlette", "uvicorn",
}  # fmt: skip
LOAD_ALL_COMMANDS = "import commands; [commands.load_command(name) for name in commands.COMMANDS]"
INTERNAL_WORDS = re.compile(r"\b(claims?|leases?|guard|fence|settles?|ring|isolated|charged)\b", re.I)


def manage(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "manage.py"), *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


def every_help(command: Any, *path: str) -> Iterator[tuple[str, str]]:
    """Yield the command and each one below it with its help text."""
    yield " ".join(path), CliRunner().invoke(commands.app, [*path, "--help"]).output
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from every_help(subcommand, *path, name)


def imported(*arguments: str) -> set[str]:
    """Run Python, and return the packages and modules that it imported."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}


def test_every_command_has_a_help_with_an_example_and_without_internal_words() -> None:
    helps = {path: text for name in COMMANDS for path, text in every_help(commands.load_command(name), name)}
    assert set(helps) >= CONTRACT
    assert [name for name, text in helps.items() if not re.search(r"Example:.*manage\.py", text)] == []
    assert [name for name, text in helps.items() if "<bool>" in text] == []
    assert [(name, found[0]) for name, text in helps.items() if (found := INTERNAL_WORDS.search(text))] == []


def test_the_list_of_commands_has_every_command_with_the_first_sentence_of_its_help() -> None:
    defined = {}
    for path in (ROOT / "commands").glob("*.py"):
        if "\ndef register(" in path.read_text():
            subject = typer.Typer()
            import_module(f"commands.{path.stem}").register(subject)
            for name, command in get_group(subject).commands.items():
                defined[name] = (path.stem, (command.help or "").partition("\n\n")[0].replace("\n", " "))
    assert defined == COMMANDS


def test_help_lists_every_command_and_imports_none() -> None:
    shown = manage("--help", COLUMNS="1000")
    assert shown.returncode == 0
    for name, listed in COMMANDS.items():
        assert re.search(rf"│ {name} +{re.escape(listed.summary.replace('`', ''))} +│\n", shown.stdout)
    found = imported("manage.py", "--help")
    assert "typer" in found
    assert found & (LOAD_SLOWLY | {"markdown_it"}) == set()


def test_a_command_imports_what_loads_slowly_only_when_it_runs() -> None:
    found = imported("-c", LOAD_ALL_COMMANDS)
    assert "commands" in found
    assert found & LOAD_SLOWLY == set()


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


def test_a_package_that_only_one_command_needs_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "pydantic_settings.py").write_text("raise ModuleNotFoundError(name='pydantic_settings')")
    said = manage("config", PYTHONPATH=str(tmp_path))
    assert said.returncode == 1
    assert said.stderr.startswith("manage.py: pydantic_settings is not installed: run `make up` once")
