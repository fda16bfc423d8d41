"""No setting exists that nothing reads, and each one is set by a test that shows its effect."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import settings
from settings import ROOT, Settings
from tests.test_architecture import python_files, sources

SETTINGS: Final = Path("settings.py")
NAMES: Final = ("current()", "settings", "current", "options")  # what the code calls its settings
READ_AS_VARIABLES: Final = {"ingest_redis_reclaim_idle_ms"}  # an alias with another unit
# These name variables and show no effect.
NO_EFFECT: Final = {"test_settings.py", "test_settings_in_use.py", "test_compose.py", "test_monitoring_profile.py"}


def test_every_setting_is_read() -> None:
    found = {each for path in sources() if path != SETTINGS for each in _reads(path)}
    through = _readers_in_settings()
    unread = [
        field
        for field in Settings.model_fields
        if not {field, field.removeprefix("given_")} & found and not through.get(field, set()) & found
    ]
    assert set(unread) == READ_AS_VARIABLES
    text = (ROOT / SETTINGS).read_text()
    assert all(f'"{field.upper()}"' in text for field in READ_AS_VARIABLES)


def test_every_setting_is_set_by_a_test() -> None:
    given = {
        name
        for path in python_files()
        if path.parts[0] == "tests" and path.name not in NO_EFFECT
        for name in _names_given(path)
    }
    assert [field for field in Settings.model_fields if not given & set(settings.variables(field))] == []


def _reads(path: Path) -> set[str]:
    """Return the attributes of settings that a file reads. Switches read them by name."""
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith(NAMES):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("receipt_"):
            found.add(node.value)
    return found


def _readers_in_settings() -> dict[str, set[str]]:
    """Return, by field, the properties and methods of Settings that read it."""
    (made,) = (node for node in _tree(SETTINGS).body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    found: dict[str, set[str]] = {}
    for function in (node for node in made.body if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                found.setdefault(node.attr, set()).add(function.name)
    return found


def _names_given(path: Path) -> set[str]:
    """Return the texts and the names of keyword arguments in a file: variables are set with either."""
    nodes = list(ast.walk(_tree(path)))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return texts | {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}


def _tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())
