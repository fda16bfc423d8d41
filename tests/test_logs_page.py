"""Every log record of ours states an event, and docs/logs.md lists exactly these events."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from receipts.streams.fault_events import FaultEvent
from settings import ROOT
from tasks.execution.outcome_log import EVENTS
from tests.test_architecture import sources

LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def calls() -> Iterator[tuple[Path, ast.Call]]:
    for path in sources():
        if path.parts[0] not in ("bench", "chaos"):
            for node in ast.walk(ast.parse((ROOT / path).read_text())):
                if isinstance(node, ast.Call):
                    yield path, node


def logs(call: ast.Call) -> bool:
    function = call.func
    return isinstance(function, ast.Attribute) and function.attr in LEVELS and ast.unparse(function.value) == "logger"


def test_every_log_record_has_an_event() -> None:
    without = [
        f"{path}:{call.lineno}"
        for path, call in calls()
        if logs(call) and not any(each.arg == "extra" for each in call.keywords)
    ]
    assert without == []


def test_the_page_lists_exactly_the_events_of_the_code() -> None:
    found = {*EVENTS.values(), *(event.value for event in FaultEvent)}
    for path in sources():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                found |= {text for key, value in pairs if _is_event(key) for text in _texts(value)}
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("task_fields"):
                found |= set(_texts(node.args[0]))
    page = (ROOT / "docs" / "logs.md").read_text()
    listed = re.findall(r"^\| `(\w+)`", page, re.MULTILINE)
    assert sorted(listed) == sorted(found)


def _is_event(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and key.value == "event"


def _texts(value: ast.expr) -> Iterator[str]:
    """Yield the texts of a literal, and of both sides of a conditional expression."""
    if isinstance(value, ast.IfExp):
        yield from (*_texts(value.body), *_texts(value.orelse))
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
