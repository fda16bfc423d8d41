"""Check the rules of the code base that ruff, mypy and import-linter cannot check.

Each test collects every offender and expects an empty list. The direction of imports is checked by `lint-imports`
(pyproject.toml), which reads packages only; the modules beside them are checked here.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from models.tables import Base
from settings import ROOT

MAX_LINES: Final = 400
LEDGER_SQL: Final = Path("models/migrations/versions/0001_ledger.sql")

# What each module outside the packages may import of ours. Files of a migration must not change with our code.
ALLOWED_IMPORTS: Final = {
    "home_files.py": set[str](),
    "child_process.py": {"models"},
    "failpoint.py": set[str](),
    "metrics.py": set[str](),
    "tracing.py": {"settings"},
    "setting_types.py": set[str](),
    "settings.py": {"home_files", "setting_types"},
    "celeryconfig.py": {"settings", "tasks"},
    "manage.py": {"commands"},
    "models/migrations/env.py": {"models"},
    "models/migrations/versions/0001_ledger.py": set[str](),
}

# The bench runs these with packages that are not installed beside ours.
FOREIGN_PROGRAMS: Final = {"bench.peers.dramatiq_", "bench.peers.pgqueuer_", "bench.peers.procrastinate_"}

# Imports every module named on the command line and prints what changed in the process meanwhile.
IMPORT_EVERYTHING: Final = """
import importlib, json, os, pathlib, signal, sys, tempfile, threading

def state():
    return {
        "environment": dict(os.environ),
        "signals": {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "current folder": os.getcwd(),
        "arguments": list(sys.argv),
        "temporary files": sorted(map(str, pathlib.Path(tempfile.gettempdir()).rglob("*"))),
        "threads": [thread.name for thread in threading.enumerate()],
    }

modules = json.load(sys.stdin)
before = state()
for module in modules:
    importlib.import_module(module)
after = state()
print(json.dumps({name: [before[name], after[name]] for name in before if before[name] != after[name]}))
"""


def test_import_linter_reads_every_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    packages = {path.parts[0] for path in sources() if len(path.parts) > 1}
    assert set(config["root_packages"]) == packages


def test_a_module_outside_the_packages_imports_only_what_is_left_of_it() -> None:
    ours = {path.parts[0].removesuffix(".py") for path in python_files()}
    outside = [path for path in sources() if len(path.parts) == 1 or path.is_relative_to("models/migrations")]
    assert {str(path): set(_imports(path)) & ours for path in outside} == ALLOWED_IMPORTS


def test_importing_a_module_has_no_side_effect(tmp_path: Path) -> None:
    """An application that imports us keeps its environment, its signal handlers and its folders."""
    modules = sorted(set(map(_module_name, sources())) - FOREIGN_PROGRAMS)
    done = subprocess.run(
        [sys.executable, "-B", "-c", IMPORT_EVERYTHING],
        input=json.dumps([name for name in modules if "migrations" not in name]),
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "TMPDIR": str(tmp_path),
            "CELERIAC_HOME": str(tmp_path / "home"),
            "BROKER_URL": "redis://127.0.0.1:1/0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout), done.stderr) == ({}, "")


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {str(path): len(_text(path).splitlines()) for path in python_files()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_every_source_file_says_why_it_exists() -> None:
    assert [str(path) for path in sources() if _text(path) and not ast.get_docstring(_tree(path))] == []


def test_the_api_and_the_commands_hold_no_sql() -> None:
    """`api/tokens.py` and `console/sessions.py` are the exceptions: they store tokens and sessions."""
    doors = [path for path in sources() if path.parts[0] in ("api", "console", "commands")]
    doors = [path for path in doors if path not in (Path("api/tokens.py"), Path("console/sessions.py"))]
    statement = re.compile(r"\b(SELECT|INSERT INTO|UPDATE|DELETE FROM)\b")
    assert [str(path) for path in doors if any(map(statement.search, _literals(path)))] == []
    assert [str(path) for path in doors if {"sqlalchemy.text", "models.sql.sql"} & set(_imported_names(path))] == []


def test_every_statement_names_our_tables_and_functions_with_their_schema() -> None:
    """A caller's `search_path` may not contain our schema, or may contain a table of the same name."""
    tables = "|".join(table.name for table in Base.metadata.tables.values())
    created = _without_comments(_text(LEDGER_SQL))
    functions = "|".join(re.findall(r"CREATE FUNCTION ledger\.(\w+)", created))
    sequences = "|".join(re.findall(r"CREATE SEQUENCE ledger\.(\w+)", created))
    bare = re.compile(
        rf"\b(?:FROM|JOIN|INTO|UPDATE|TRUNCATE|ANALYZE|TABLE|ON)\s+(?:ONLY\s+)?(?:{tables})\b(?!\.)"
        rf"|(?<![.\w])(?:{functions})\s*\("
        rf"|'(?:{sequences})'"
    )
    statements = {str(path): _literals(path) for path in sources()} | {str(LEDGER_SQL): [created]}
    assert [
        f"{name}: {found[0]}" for name, texts in statements.items() for text in texts for found in bare.finditer(text)
    ] == []


def test_only_ledger_now_tells_the_time() -> None:
    """SQL's now() is the start of the transaction, and clock_timestamp() cannot be an index condition."""
    other_clocks = re.compile(
        r"(?<!ledger_)\bnow\(\)|\b(clock|statement|transaction)_timestamp\(|\bCURRENT_TIMESTAMP\b"
    )
    definition = re.compile(r"CREATE FUNCTION ledger\.ledger_now\(\).*?;", re.DOTALL)
    may_ask = ("bench", "checks")  # the doctor compares the server's clock with this machine's
    elsewhere = {"sinks/keyed_postgres.py"}  # its statements run in a database that has no ledger_now()
    statements = {str(path): _literals(path) for path in sources() if path.parts[0] not in may_ask}
    statements = {name: texts for name, texts in statements.items() if name not in elsewhere}
    for path in repository_files():
        if path.suffix == ".sql":
            statements[str(path)] = [definition.sub("", _without_comments(_text(path)))]
    assert [name for name, texts in statements.items() if any(map(other_clocks.search, texts))] == []


def test_no_name_is_an_empty_word() -> None:
    empty = {"manager", "helper", "helpers", "util", "utils", "common", "service", "processor", "data", "info", "misc"}
    names = {path: [path.stem, path.parent.name] for path in python_files()}
    for path in sources():
        names[path] += _defined_names(path)
    words = re.compile(r"[A-Z]?[a-z0-9]+")
    inherited = ("handle_data", "data_received")  # of HTMLParser and asyncio.Protocol
    offenders = [
        f"{path}: {name}"
        for path, found in names.items()
        for name in found
        if {word.lower() for word in words.findall(name)} & empty and name not in inherited
    ]
    assert offenders == []


def test_sentences_name_who_acts() -> None:
    """A few of these words are left where they are the natural ones, such as the name of a Unix user."""
    words = re.compile("who(?:ever)|(?:no|some|any)body", re.IGNORECASE)
    kinds = (".py", ".sql", ".md", ".sh", ".yml", ".toml", ".in")
    counts = {
        str(path): len(words.findall(_text(path)))
        for path in repository_files()
        if path.suffix in kinds and not {"tasks", "execution"} <= set(path.parts)
    }
    total = sum(counts.values())
    assert total < 15, "\n".join(f"{name}: {count}" for name, count in counts.items() if count)


@cache
def repository_files() -> tuple[Path, ...]:
    """Return the files of the repository and those that are about to be added, relative to its root."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return tuple(Path(name) for name in listed if (ROOT / name).is_file())


def python_files() -> list[Path]:
    return [path for path in repository_files() if path.suffix == ".py"]


def sources() -> list[Path]:
    """Return every Python file that is not a test."""
    return [path for path in python_files() if path.parts[0] != "tests"]


@cache
def _text(path: Path) -> str:
    return (ROOT / path).read_text()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path))


def _module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path) -> Iterator[str]:
    """Yield the top-level package or module of each import, imports inside functions included."""
    return (name.partition(".")[0] for name in _imported_names(path))


def _imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _defined_names(path: Path) -> Iterator[str]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def _literals(path: Path) -> list[str]:
    """Return the string literals of a file without its docstrings; the fields of an f-string become `{}`."""
    nodes = list(ast.walk(_tree(path)))
    parts = {
        id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node
    }
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [
        _literal(node)
        for node in nodes
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in parts | docstrings
    ]


def _literal(node: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node.value, str) else ""


def _without_comments(statements: str) -> str:
    return re.sub(r"--.*", "", statements)
