"""The documentation is correct: generated pages are fresh, and every named command and file exists."""

from __future__ import annotations

import re
import subprocess
from typing import Final

import pytest
import typer

import commands
from commands.configuration_page import configuration_page
from commands.messages import messages_page
from commands.metrics_page import metrics_page
from settings import ROOT

PAGES: Final = [
    page.relative_to(ROOT).as_posix() for page in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")))
]
CELERY: Final = {"worker", "beat", "flower", "inspect", "control"}

# Package registries and absolute paths, which hold on one machine only.
REGISTRY: Final = re.compile(r"https?://[^\s/]*(pypi|pythonhosted|npmjs|artifactory|nexus|devpi)|/simple/?['\"\s]")
MACHINE_PATH: Final = re.compile(r"(?<![\w.$}/~])/(home|root|Users|work|workspace|builds)/\w")


def test_the_generated_pages_are_fresh() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == configuration_page(), "stale: run `make docs`"
    assert (ROOT / "docs" / "messages.md").read_text() == messages_page(), "stale: run `make docs`"
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics_page(), "stale: run `make docs`"


def test_every_named_make_target_exists() -> None:
    assert _unknown(r"\bmake ([a-z][a-z-]*)", _targets()) == {}


def test_every_named_command_of_manage_py_exists() -> None:
    assert _unknown(r"\bmanage\.py ([a-z][a-z-]*)", _commands()) == {}


def test_every_named_command_of_celery_exists() -> None:
    assert _unknown(r"\bcelery -A tasks ([a-z]+)", CELERY) == {}


def test_every_named_or_linked_file_exists() -> None:
    missing = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        linked = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
        missing += [f"{page}: {link}" for link in linked if not (ROOT / page).parent.joinpath(link).exists()]
        named = set(re.findall(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|md|sh|in|txt|yml|toml)|(?:[\w.-]+/)+)`", text))
        missing += [f"{page}: {name}" for name in named if not (ROOT / name).exists() and name != ".celeriac/"]
    assert missing == []


def test_readme_names_every_command_and_every_target() -> None:
    readme = _code("README.md")
    assert {command for command in _commands() if not re.search(rf"manage\.py {command}\b", readme)} == set()
    assert {target for target in _targets() if not re.search(rf"\bmake {target}\b", readme)} == set()


def test_readme_begins_with_one_sentence_one_reason_and_one_thing_to_run() -> None:
    blocks = (ROOT / "README.md").read_text().split("\n\n")
    assert blocks[0] == "# Celeriac"
    assert blocks[1].startswith("**Celery tasks whose effects happen once, with a receipt.**")
    assert blocks[3] == "```sh\nmake up\n```"


def test_no_file_names_a_package_registry_or_a_path_of_one_machine() -> None:
    found = []
    for name in _files():
        try:
            text = (ROOT / name).read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{name}: {hit[0]}" for pattern in (REGISTRY, MACHINE_PATH) for hit in pattern.finditer(text)]
        if len(ROOT.parts) > 2 and str(ROOT) in text:  # /app would be found in the Dockerfile
            found.append(f"{name}: {ROOT}")
    assert found == []


def _unknown(pattern: str, known: set[str]) -> dict[str, set[str]]:
    """Return for each page the words in its code that match the pattern and are not known."""
    found = {page: set(re.findall(pattern, _code(page))) - known for page in PAGES}
    return {page: words for page, words in found.items() if words}


def _code(page: str) -> str:
    """Return the code of a page: fenced blocks, and text between backticks."""
    text = (ROOT / page).read_text()
    fences = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join([*fences, *re.findall(r"`([^`]+)`", rest)])


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _commands() -> set[str]:
    command = typer.main.get_command(commands.app)
    return set(command.list_commands(typer.Context(command)))  # type: ignore[attr-defined]


def _files() -> list[str]:
    """Return the files in the repository and new files that git does not ignore."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git clone: the files of the repository are unknown")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
