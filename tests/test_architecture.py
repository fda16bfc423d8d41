"""The shape of the project: imports point left only, files stay small, each door stays thin."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from settings import ROOT

# The arrow of the design. A module may import from its own place and from places to its left.
ARROW = (
    ("home_files", "settings", "failpoint"),
    ("metrics",),
    ("models",),
    ("outbox",),
    ("sinks",),
    ("celeryconfig", "tasks"),
    ("receipts",),
    ("api",),
    ("console",),
    ("checks", "embedded"),
    ("bench", "chaos"),
    ("commands",),
    ("manage",),
)
RANK = {name: rank for rank, names in enumerate(ARROW) for name in names}
FILE_CEILING = 400


@cache
def sources() -> tuple[Path, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return tuple(path for path in map(Path, listed) if (ROOT / path).exists())


def own_sources() -> list[Path]:
    return [path for path in sources() if path.parts[0] != "tests"]


def place(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full name"
            yield node.module or ""


def test_the_project_is_seen_whole() -> None:
    assert len(own_sources()) > 40
    assert {place(path) for path in own_sources()} <= RANK.keys()


@pytest.mark.parametrize("path", own_sources(), ids=str)
def test_imports_point_left_only(path: Path) -> None:
    for name in imports(path):
        target = name.partition(".")[0]
        if target in RANK and target != place(path):
            assert RANK[target] <= RANK[place(path)], f"{path} imports {name}, which stands to its right"


@pytest.mark.parametrize("path", own_sources(), ids=str)
def test_nothing_of_ours_imports_tests(path: Path) -> None:
    assert not any(name.partition(".")[0] == "tests" for name in imports(path))


@pytest.mark.parametrize("path", sources(), ids=str)
def test_a_file_is_small_enough_to_be_one_thing(path: Path) -> None:
    assert len((ROOT / path).read_text().splitlines()) <= FILE_CEILING


@pytest.mark.parametrize("path", [path for path in own_sources() if (ROOT / path).read_text()], ids=str)
def test_a_file_says_why_it_exists(path: Path) -> None:
    assert ast.get_docstring(ast.parse((ROOT / path).read_text())), "the first lines say what the file is for"


@pytest.mark.parametrize("path", [p for p in own_sources() if place(p) == "outbox"], ids=str)
def test_the_outbox_knows_celery_only_in_its_one_publisher(path: Path) -> None:
    if path != Path("outbox/publishers/celery.py"):
        assert not {"celery", "tasks"} & {name.partition(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", [p for p in own_sources() if place(p) in ("api", "console", "commands")], ids=str)
def test_doors_hold_no_sql(path: Path) -> None:
    source = (ROOT / path).read_text()
    assert "sqlalchemy" not in set(imports(path))
    assert not re.search(r"\b(SELECT|INSERT INTO|UPDATE|DELETE FROM)\b", source)


@pytest.mark.parametrize(
    "path", [p for p in own_sources() if place(p) in ("models", "outbox", "sinks", "tasks", "receipts")], ids=str
)
def test_only_the_ledgers_own_clock_is_asked_for_the_time(path: Path) -> None:
    """P13: bare now() is the start of the transaction, and clock_timestamp() is no index condition."""
    source = (ROOT / path).read_text()
    if path in (Path("models/clock.py"), Path("models/migrations/versions/0001_ledger.py")):
        return  # they define ledger_now()
    code = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith("#"))
    assert not re.search(r"(?<!ledger_)\bnow\(\)|\bclock_timestamp\(\)|\bCURRENT_TIMESTAMP\b", code)


@pytest.mark.parametrize("path", own_sources(), ids=str)
def test_nothing_needs_a_test_runner_but_the_fixtures_for_users(path: Path) -> None:
    """pytest is no package of production, and `tasks.testing` is for users of any runner."""
    if path != Path("embedded/pytest_plugin.py"):
        assert not {"pytest", "embedded.pytest_plugin"} & set(imports(path))


def test_words_that_mean_nothing_name_nothing() -> None:
    nothing = {"manager", "helper", "util", "utils", "common", "service", "processor", "info"}
    assert not [str(path) for path in sources() if set(path.stem.split("_")) & nothing]
