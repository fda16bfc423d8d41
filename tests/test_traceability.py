"""The documentation names tests that exist: every rule can be traced to the test that proves it."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import Final

from settings import ROOT
from tests.test_architecture import python_files, repository_files

PROTOCOL: Final = ROOT / "docs" / "protocol.md"
TEST: Final = re.compile(r"tests/[\w/]+\.py::test_\w+")
RULE: Final = re.compile(r"^### (.+)\n((?:(?!##).*\n)*)", re.MULTILINE)
REFERENCE: Final = re.compile(r"docs/protocol\.md, ([A-Z][\w -]+?)(?=[.,:;)]| and [A-Z])")
SOURCE_DOCUMENTS: Final = re.compile(
    r"\b(the|a|each|every|this|five) seeds?\b|\bseeds/0|(?<!docs/)\bseeds\b", re.IGNORECASE
)
MAY_NAME_THEM: Final = {"docs/seeds.md", "docs/index.md", "tests/test_traceability.py"}
KINDS: Final = {".py", ".sql", ".md", ".toml", ".yml", ".sh"}


def test_every_test_that_a_page_names_exists() -> None:
    named = {page.name: set(TEST.findall(page.read_text())) for page in sorted((ROOT / "docs").glob("*.md"))}
    assert {page: missing for page, tests in named.items() if (missing := tests - _tests())} == {}
    assert named["seeds.md"]
    assert named["internals.md"]


def test_every_rule_of_the_protocol_is_proved_by_a_test() -> None:
    rules = RULE.findall(PROTOCOL.read_text())
    assert len(rules) >= 25
    assert [name for name, text in rules if not _tests() & set(TEST.findall(text.partition("Proved by:")[2]))] == []


def test_every_rule_that_the_code_refers_to_is_in_the_protocol() -> None:
    rules = re.findall(r"^### (.+)$|^- \*\*(.+?)\*\*", PROTOCOL.read_text(), re.MULTILINE)
    names = {name for pair in rules for name in pair}
    unknown = []
    for path in python_files():
        text = re.sub(r"\s*\n[\s#]*", " ", (ROOT / path).read_text())  # a reference may be broken over two lines
        given = REFERENCE.findall(text)
        unknown += [f"{path}: {name}" for name in given if name not in names]
    assert unknown == []


def test_the_glossary_stays_short_and_newcomers_find_it() -> None:
    entries = re.findall(r"^\| \*\*", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert 20 <= len(entries) <= 25
    assert "](docs/glossary.md)" in (ROOT / "README.md").read_text()
    assert "](docs/glossary.md)" in (ROOT / "CONTRIBUTING.md").read_text()


def test_only_the_page_that_traces_the_source_documents_mentions_them() -> None:
    found = []
    for path in repository_files():
        if path.suffix in KINDS and path.as_posix() not in MAY_NAME_THEM:
            found += [f"{path}: {hit[0]}" for hit in SOURCE_DOCUMENTS.finditer((ROOT / path).read_text())]
    assert found == []


@cache
def _tests() -> frozenset[str]:
    """Return every test function as `path::name`."""
    found = set()
    for path in python_files():
        if path.name.startswith("test_"):
            nodes = ast.walk(ast.parse((ROOT / path).read_text()))
            functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{path.as_posix()}::{function.name}" for function in functions}
    return frozenset(found)
