"""docker-compose.yml and .env.example, read, and by Compose itself where it is installed.

`test_compose_runs.py` runs what the file names; `test_image.py` reads what the image is made from.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import flower.options  # type: ignore[import-untyped]  # noqa: F401 - defines them
import pytest
import tornado.options
import typer
import yaml

import commands
import settings
from settings import ROOT, Settings
from tests.compose import BIN, COMPOSE, OURS, SERVICES, is_pinned, run
from tests.servers import ServersOfTests

ONE_SHOT: Final = {"migrate"}
LONG_RUNNING: Final = sorted(set(SERVICES) - ONE_SHOT)
EXAMPLE: Final = (ROOT / ".env.example").read_text()
REQUIRED: Final = re.findall(r"^(\w+)=$", EXAMPLE, re.MULTILINE)
OPTIONAL: Final = re.findall(r"^#(\w+)=\S", EXAMPLE, re.MULTILINE)
OF_OTHERS: Final = {"FLOWER_ADDRESS", "FLOWER_BASIC_AUTH"}


# the file as a whole


def test_every_part_of_the_system_has_a_service() -> None:
    servers = {"postgres", "redis-broker", "redis-receipts"}
    assert set(SERVICES) == servers | {"migrate", "worker", "system", "beat", "api", "flower"}
    assert set(OURS) == set(SERVICES) - servers


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
@pytest.mark.parametrize("missing", REQUIRED)
@pytest.mark.parametrize("how", ["absent", "empty"])
def test_compose_refuses_to_start_with_one_password_missing(tmp_path: Path, missing: str, how: str) -> None:
    values = dict.fromkeys(REQUIRED, "secret") | {missing: ""}
    if how == "absent":
        del values[missing]
    done = _compose_config(tmp_path, values)
    assert done.returncode != 0
    assert f"{missing} has no value" in done.stderr


def test_the_recipe_of_the_example_fills_in_every_password_with_another_one(tmp_path: Path) -> None:
    (tmp_path / ".env.example").write_text(EXAMPLE)
    recipe = "\n".join(re.findall(r"^# {3}(.+)$", EXAMPLE, re.MULTILINE))
    subprocess.run(["sh", "-c", recipe], cwd=tmp_path, check=True)
    made = dict(re.findall(r"^(\w+)=(.*)$", (tmp_path / ".env").read_text(), re.MULTILINE))
    assert set(made) == set(REQUIRED)
    assert len(set(made.values())) == len(REQUIRED)
    assert all(re.fullmatch(r"[0-9a-f]{48}", value) for value in made.values())
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0


def test_every_variable_is_in_the_example_and_none_is_there_for_nothing() -> None:
    assert _interpolated("") == set(REQUIRED) | set(OPTIONAL)


def test_no_password_has_a_default() -> None:
    with_default = _interpolated(":-")
    assert with_default == set(OPTIONAL)
    assert not any("PASSWORD" in name for name in with_default)
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|AUTH|URL", name):
                assert ":?" in value, f"{name} is written into the file"


# what a container may do


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_locked_down(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    if name not in OURS:  # the user of our image is in the Dockerfile
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"])
    else:
        assert any(mount.startswith("/tmp") for mount in service["tmpfs"])


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_on_loopback_only(name: str) -> None:
    ports = SERVICES[name].get("ports", [])
    assert all(re.fullmatch(r"127\.0\.0\.1:\$\{\w+:-\d+\}:\d+", port) for port in ports)
    assert bool(ports) == (name in ("api", "flower"))


def test_the_servers_are_on_a_network_without_a_way_out() -> None:
    assert COMPOSE["networks"]["servers"] == {"internal": True}
    for name in set(SERVICES) - set(OURS):
        assert SERVICES[name]["networks"] == ["servers"]


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_every_long_running_service_has_a_health_check_and_comes_back(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] in ("CMD", "CMD-SHELL")
    assert {"interval", "timeout", "retries", "start_period"} <= check.keys()
    assert SERVICES[name]["restart"] == "unless-stopped"
    assert SERVICES[name]["stop_grace_period"]


def test_nothing_starts_before_what_it_needs() -> None:
    assert SERVICES["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert SERVICES["migrate"]["restart"] == "no"
    for name in ("worker", "system", "beat", "api"):
        needs = SERVICES[name]["depends_on"]
        assert needs["migrate"] == {"condition": "service_completed_successfully"}
        assert needs["redis-broker"] == needs["redis-receipts"] == {"condition": "service_healthy"}


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_pinned_to_a_release(name: str) -> None:
    image = SERVICES[name]["image"]
    assert image == "celeriac:local" if name in OURS else is_pinned(image)


def test_what_must_survive_is_on_a_volume() -> None:
    """The image of PostgreSQL 18 keeps its data below this folder; a volume on …/data would stay empty."""
    assert "ledger:/var/lib/postgresql" in SERVICES["postgres"]["volumes"]
    assert "receipts:/data" in SERVICES["redis-receipts"]["volumes"]
    assert set(COMPOSE["volumes"]) == {"ledger", "receipts"}


def test_postgres_allows_prepared_transactions() -> None:
    assert "max_prepared_transactions=64" in SERVICES["postgres"]["command"]


# our image's commands and health checks


@pytest.mark.parametrize("name", OURS)
def test_variables_passed_to_our_services_are_known(name: str) -> None:
    known = {variable for field in Settings.model_fields for variable in settings.variables(field)}
    assert set(OURS[name]["environment"]) <= known | OF_OTHERS


@pytest.mark.parametrize("name", OURS)
def test_every_command_resolves_in_the_virtual_environment(name: str) -> None:
    command = OURS[name]["command"]
    assert (BIN / command[0]).exists()
    match command:
        case ["python", "manage.py", subcommand, *_]:
            door = typer.main.get_command(commands.app)
            assert subcommand in door.list_commands(typer.Context(door))  # type: ignore[attr-defined]
        case ["celery", "-A", "tasks", subcommand, *options]:
            known = _celery("-A", "tasks", subcommand, "--help").stdout
            known += "".join(f"--{name}" for name in tornado.options.options)  # Flower's help does not list its own
            assert all(option.partition("=")[0] in known for option in options if option.startswith("--"))
        case ["uvicorn", "api.app:app", *options]:
            done = run([str(BIN / "uvicorn"), "--help"])
            assert done.returncode == 0
            assert all(option in done.stdout for option in options if option.startswith("--"))
        case _:
            pytest.fail(f"{name} runs {command}, of which this test knows nothing")


def test_the_parts_are_started_as_the_embedded_stack_starts_them(stack: ServersOfTests) -> None:
    from embedded.stack import plan

    parts = {part.role: list(part.command) for part in plan(stack.home, settings.current()).parts}
    for name in ("worker", "system", "beat"):
        assert _options(OURS[name]["command"]) == _options(parts[name])


@pytest.mark.parametrize("name", ["api", "flower"])
def test_web_health_checks_ask_the_port_that_is_served_and_published(name: str) -> None:
    service = OURS[name]
    asked = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", service["healthcheck"]["test"][-1])
    assert asked
    assert re.search(rf"--port[ =]{asked[1]}\b", " ".join(service["command"]))
    assert service["ports"][0].endswith(f":{asked[1]}")
    compile(service["healthcheck"]["test"][-1], name, "exec")


def test_the_health_check_of_the_api_asks_a_route_that_exists() -> None:
    from api.app import app

    asked = re.search(r"8000(/\w+)", OURS["api"]["healthcheck"]["test"][-1])
    assert asked
    assert asked[1] in {getattr(route, "path", None) for route in app.routes}


# how


def _options(command: list[str]) -> list[str]:
    """From Celery's subcommand on."""
    return command[next(place for place, word in enumerate(command) if word in ("worker", "beat")) :]


def _interpolated(operator: str) -> set[str]:
    """The variables of the file: all, or those written with this operator. `$$` is no variable."""
    text = re.sub(r"^\s*#.*$", "", (ROOT / "docker-compose.yml").read_text(), flags=re.MULTILINE).replace("$$", "")
    return set(re.findall(r"\$\{(\w+)" + re.escape(operator), text))


def _compose_config(folder: Path, values: Mapping[str, str] | None) -> subprocess.CompletedProcess[str]:
    compose = _find_compose()
    shutil.copy(ROOT / "docker-compose.yml", folder)
    if values is not None:
        (folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    return subprocess.run(
        [*compose, "config"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def _find_compose() -> list[str]:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker") and run(["docker", "compose", "version"]).returncode == 0:
        return ["docker", "compose"]
    pytest.skip("docker-compose is not installed, so Compose itself did not read docker-compose.yml")


def _celery(*arguments: str) -> subprocess.CompletedProcess[str]:
    nowhere = {"BROKER_URL": "redis://127.0.0.1:1/0", "FLOWER_BASIC_AUTH": "user:password"}
    done = run([str(BIN / "celery"), *arguments], nowhere)
    assert done.returncode == 0, done.stderr
    return done
