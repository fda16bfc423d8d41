"""Check the text of deploy/Dockerfile and .dockerignore; building the image would need Docker."""

from __future__ import annotations

import re
from typing import Final

from settings import ROOT
from tests.compose import is_pinned

DOCKERFILE: Final = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")


def test_the_image_has_pinned_bases_and_runs_as_an_ordinary_user() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert len(bases) == 2
    assert all(is_pinned(base) for base in bases)
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (.+)$", last, re.MULTILINE) == ["10001:10001"]
    assert "pip" not in last
    assert "apt-get" not in DOCKERFILE


def test_the_image_installs_only_packages_with_pinned_hashes() -> None:
    (install,) = re.findall(r"pip [^&\n]*\binstall ([^&\n]+)", DOCKERFILE)
    assert install.split() == ["--require-hashes", "--only-binary", ":all:", "-r", "/requirements.txt"]


def test_the_image_contains_no_secret() -> None:
    assert not re.search(r"^(ARG|ENV).*(PASSWORD|SECRET|TOKEN|KEY|_URL)", DOCKERFILE, re.MULTILINE)


def test_all_our_packages_and_modules_are_copied_into_the_image() -> None:
    copied = {name.rstrip("/") for line in _copies() for name in line.split()[:-1]} - {"requirements.txt"}
    assert all((ROOT / name).exists() for name in copied)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    modules = {path.name for path in ROOT.glob("*.py")}
    assert copied == packages | modules


def test_secrets_and_tests_are_excluded_from_the_build_and_copied_files_are_not() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().split("\n"))
    assert {".git", ".venv", ".celeriac", ".env", "tests"} <= ignored
    copied = {name.rstrip("/") for line in _copies() for name in line.split()[:-1]}
    assert not copied & ignored


def _copies() -> list[str]:
    return re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
