"""Check docker-compose.yml and .env.example, with Compose itself where it is installed.

`test_compose_runs.py` runs the commands of the file; `test_image.py` checks the Dockerfile;
`deploy/test_monitoring_profile.py` checks the profile `monitoring`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import celery.bin.celery
import click
import flower.options  # type: ignore[import-untyped]  # noqa: F401 - defines the options of Flower
import pytest
import tornado.options
import typer
import uvicorn
import yaml
from typer.testing import CliRunner

import commands
import settings
from embedded.postgres import CONFIGURATION
from embedded.roles import ROLES, SERVER_ROLES
from settings import ROOT, Settings
from tests.compose import BIN, COMPOSE, MONITORING, OURS, SERVICES, find_compose, is_pinned
from tests.servers import ServersOfTests

EXAMPLE: Final = (ROOT / ".env.example").read_text()
REQUIRED: Final = re.findall(r"^(\w+)=$", EXAMPLE, re.MULTILINE)
OPTIONAL: Final = re.findall(r"^#(\w+)=\S", EXAMPLE, re.MULTILINE)
OF_OTHERS: Final = {"FLOWER_ADDRESS", "FLOWER_BASIC_AUTH", "REMAP_SIGTERM"}


def test_every_program_of_the_stack_has_a_service() -> None:
    assert set(SERVICES) - set(MONITORING) == {"migrate", *ROLES}
    assert set(OURS) == set(SERVICES) - set(MONITORING) - set(SERVER_ROLES)


@pytest.mark.guarantee
def test_compose_accepts_the_file_with_every_password_filled_in(tmp_path: Path) -> None:
    done = _compose_config(tmp_path, dict.fromkeys(REQUIRED, "secret"))
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["services"].keys() == SERVICES.keys()


@pytest.mark.guarantee
def test_compose_refuses_to_start_without_an_env_file(tmp_path: Path) -> None:
    done = _compose_config(tmp_path, None)
    assert done.returncode != 0
    assert ".env.example" in done.stderr


@pytest.mark.guarantee
@pytest.mark.parametrize(("missing", "how"), [*((name, "absent") for name in REQUIRED), (REQUIRED[0], "empty")])
def test_compose_refuses_to_start_with_one_password_missing(tmp_path: Path, missing: str, how: str) -> None:
    values = dict.fromkeys(REQUIRED, "secret") | {missing: ""}
    if how == "absent":
        del values[missing]
    done = _compose_config(tmp_path, values)
    assert done.returncode != 0
    assert f"{missing} has no value" in done.stderr


def test_the_command_in_the_example_generates_a_different_password_for_each_variable(tmp_path: Path) -> None:
    (tmp_path / ".env.example").write_text(EXAMPLE)
    recipe = "\n".join(re.findall(r"^# {3}(.+)$", EXAMPLE, re.MULTILINE))
    subprocess.run(["sh", "-c", recipe], cwd=tmp_path, check=True)
    made = dict(re.findall(r"^(\w+)=(.*)$", (tmp_path / ".env").read_text(), re.MULTILINE))
    assert set(made) == set(REQUIRED)
    assert len(set(made.values())) == len(REQUIRED)
    assert all(re.fullmatch(r"[0-9a-f]{48}", value) for value in made.values())
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0


def test_the_example_lists_exactly_the_variables_that_the_file_uses() -> None:
    assert _interpolated("") == set(REQUIRED) | set(OPTIONAL)


def test_no_password_has_a_default() -> None:
    with_default = _interpolated(":-")
    assert with_default == set(OPTIONAL)
    assert _interpolated(":?") == set(REQUIRED)  # Compose treats an empty one as a missing one
    assert not any("PASSWORD" in name for name in with_default)
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|AUTH|URL", name):
                assert ":?" in value, f"{name} must come from the .env file"


def test_every_container_runs_without_privileges() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
        if name not in OURS:  # the Dockerfile sets the user of our image
            assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"]), name
        else:
            assert any(mount.startswith("/tmp") for mount in service["tmpfs"]), name


def test_ports_are_published_on_loopback_only() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == {"api", "flower", *MONITORING}
    for port in (port for ports in published.values() for port in ports):
        assert re.fullmatch(r"127\.0\.0\.1:\$\{\w+:-\d+\}:\d+", port)


def test_the_servers_are_on_an_internal_network() -> None:
    assert COMPOSE["networks"]["servers"] == {"internal": True}
    for name in SERVER_ROLES:
        assert SERVICES[name]["networks"] == ["servers"]


def test_every_long_running_service_has_a_health_check_and_restarts() -> None:
    for name in (*ROLES, *MONITORING):
        check = SERVICES[name]["healthcheck"]
        assert check["test"][0] in ("CMD", "CMD-SHELL"), name
        assert {"interval", "timeout", "retries", "start_period"} <= check.keys(), name
        assert SERVICES[name]["restart"] == "unless-stopped", name
        assert SERVICES[name]["stop_grace_period"], name


def test_services_start_after_those_they_need() -> None:
    assert SERVICES["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert SERVICES["migrate"]["restart"] == "no"
    for name in ("worker", "system", "receipts", "beat", "api"):
        needs = SERVICES[name]["depends_on"]
        assert needs["migrate"] == {"condition": "service_completed_successfully"}
        assert needs["redis-broker"] == needs["redis-receipts"] == {"condition": "service_healthy"}


def test_every_image_is_pinned_to_a_release() -> None:
    for name, service in SERVICES.items():
        assert service["image"] == "celeriac:local" if name in OURS else is_pinned(service["image"]), name


def test_the_ledger_and_the_receipts_are_on_volumes() -> None:
    """PostgreSQL 18 stores its data in a subfolder of this folder; a volume on …/data would stay empty."""
    assert "ledger:/var/lib/postgresql" in SERVICES["postgres"]["volumes"]
    assert "receipts:/data" in SERVICES["redis-receipts"]["volumes"]
    assert set(COMPOSE["volumes"]) == {"ledger", "receipts", "receipt-keys", *MONITORING}


def test_postgres_has_the_limits_of_the_embedded_one() -> None:
    for name in ("max_prepared_transactions", "max_connections"):
        assert f"{name}={CONFIGURATION[name]}" in SERVICES["postgres"]["command"]


def test_our_services_get_known_variables_only() -> None:
    known = {variable for field in Settings.model_fields for variable in settings.variables(field)}
    assert {variable for service in OURS.values() for variable in service["environment"]} <= known | OF_OTHERS


@pytest.mark.parametrize("name", OURS)
def test_every_command_and_its_options_exist(name: str) -> None:
    command = OURS[name]["command"]
    assert (BIN / command[0]).exists()
    match command:
        case ["python", "manage.py", subcommand, *_]:
            group = typer.main.get_command(commands.app)
            assert subcommand in group.list_commands(typer.Context(group))  # type: ignore[attr-defined]
        case ["celery", "-A", "tasks", "flower", *options]:
            assert _long(options) <= {f"--{name}" for name in tornado.options.options}
        case ["celery", "-A", "tasks", "worker" | "beat" as subcommand, *options]:
            assert _long(options) <= _known(celery.bin.celery.celery.commands[subcommand])
        case ["uvicorn", "api.app:app", *options]:
            assert _long(options) <= _known(uvicorn.main)
        case _:
            pytest.fail(f"{name} runs {command}, which this test does not know")


def test_workers_and_beat_have_the_options_of_the_embedded_stack(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embedded.stack import plan

    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "true")
    settings.current.cache_clear()
    planned = {program.role: list(program.command) for program in plan(stack.home, settings.current()).programs}
    for name in ("system", "receipts", "beat"):
        assert _options(OURS[name]["command"]) == _options(planned[name])
    assert _becomes(OURS["worker"]["command"], monkeypatch) == planned["worker"]


def test_with_kafka_both_stacks_start_the_kafka_worker_instead_of_the_celery_worker(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embedded.stack import plan

    assert {"INGEST_QUEUE", "KAFKA_BOOTSTRAP_SERVERS", "KAFKA_TOPIC"} <= OURS["worker"]["environment"].keys()
    monkeypatch.setenv("INGEST_QUEUE", "kafka")
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "kafka.example:9092")
    settings.current.cache_clear()
    planned = {program.role: list(program.command) for program in plan(stack.home, settings.current()).programs}
    assert planned.keys() == set(ROLES) - set(SERVER_ROLES)
    started = ["manage.py", "kafka-worker", "--processes", "2", "--log-level", "warning"]
    assert [Path(planned["worker"][1]).name, *planned["worker"][2:]] == started
    assert _becomes(OURS["worker"]["command"], monkeypatch) == planned["worker"]


def test_a_worker_of_either_stack_and_of_the_image_releases_its_tasks_at_sigterm(stack: ServersOfTests) -> None:
    """Without the variable, Docker's SIGKILL would come while the worker still finishes what it runs."""
    from embedded.stack import plan

    programs = {program.role: program.environment for program in plan(stack.home, settings.current()).programs}
    for name in ("worker", "system"):
        assert programs[name]["REMAP_SIGTERM"] == "SIGQUIT"
        assert OURS[name]["environment"]["REMAP_SIGTERM"] == "SIGQUIT"
    image = (ROOT / "deploy" / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert "REMAP_SIGTERM=SIGQUIT" in re.findall(r"^ENV (.+)$", image, re.MULTILINE)[0].split()


def test_the_api_limits_the_time_of_requests_in_both_stacks(stack: ServersOfTests) -> None:
    from api.http_protocol import GuardedProtocol
    from api.websocket_protocol import GuardedWebSocket
    from embedded.stack import plan

    (planned,) = (program for program in plan(stack.home, settings.current()).programs if program.role == "api")
    for option, protocol in (("--http", GuardedProtocol), ("--ws", GuardedWebSocket)):
        for command in (planned.command, OURS["api"]["command"]):
            given = " ".join(command).replace(f"{option}=", f"{option} ")
            assert f"{option} {protocol.__module__}:{protocol.__qualname__}" in given
    limits = [
        sorted(re.findall(r"--ws-[a-z-]+ \S+", " ".join(command).replace("=", " ")))
        for command in (planned.command, OURS["api"]["command"])
    ]
    assert limits[0] == limits[1] != []


@pytest.mark.parametrize("name", ["api", "flower"])
def test_web_health_checks_use_the_port_that_is_served_and_published(name: str) -> None:
    service = OURS[name]
    asked = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", service["healthcheck"]["test"][-1])
    assert asked
    assert re.search(rf"--port[ =]{asked[1]}\b", " ".join(service["command"]))
    assert service["ports"][0].endswith(f":{asked[1]}")
    compile(service["healthcheck"]["test"][-1], name, "exec")


def test_the_health_check_of_the_api_uses_an_existing_route() -> None:
    from api.app import app

    asked = re.search(r"8000(/\w+)", OURS["api"]["healthcheck"]["test"][-1])
    assert asked
    assert asked[1] in {getattr(route, "path", None) for route in app.routes}


def _long(options: list[str]) -> set[str]:
    """Return the names of the long options of a command line."""
    return {option.partition("=")[0] for option in options if option.startswith("--")}


def _known(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def _options(command: list[str]) -> list[str]:
    """Return the subcommand of Celery and its options."""
    return command[next(place for place, word in enumerate(command) if word in ("worker", "beat")) :]


def _becomes(command: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the program that `manage.py worker …` replaces itself with."""
    executed: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _path, arguments: executed.append(arguments))
    assert command[:2] == ["python", "manage.py"]
    assert CliRunner().invoke(commands.app, command[2:]).exit_code == 0
    return executed[0]


def _interpolated(operator: str) -> set[str]:
    """Return the variables of the file, or those with this operator. `$$` is an escaped dollar sign."""
    text = re.sub(r"^\s*#.*$", "", (ROOT / "docker-compose.yml").read_text(), flags=re.MULTILINE).replace("$$", "")
    return set(re.findall(r"\$\{(\w+)" + re.escape(operator), text))


def _compose_config(folder: Path, values: Mapping[str, str] | None) -> subprocess.CompletedProcess[str]:
    compose = find_compose()
    shutil.copy(ROOT / "docker-compose.yml", folder)
    if values is not None:
        (folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    return subprocess.run(
        [*compose, "--profile", "monitoring", "config"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
