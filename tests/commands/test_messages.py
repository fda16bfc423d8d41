"""docs/messages.md explains every code that a user can meet."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import pytest

from commands.messages import (
    OUTBOX_OUTCOMES,
    REASONS_TO_WAIT,
    SQLSTATES,
    TASK_FAILURES,
    Entry,
    error_classes,
    messages_page,
)
from models.errors import CeleriacError
from outbox.audit import AuditCode
from settings import ROOT
from tasks.core.outcomes import ErrorCode
from tasks.operations.why_waiting import ReasonCode

SCHEMA: Final = ROOT / "models" / "migrations" / "versions" / "0001_ledger.sql"
DECLARATION: Final = re.compile(r'^    code(?:: ClassVar\[str\])? = "(\w+)"', re.MULTILINE)


def test_every_declared_code_is_on_the_page() -> None:
    sources = [path.read_text() for path in ROOT.glob("[!.]*/**/*.py") if path.relative_to(ROOT).parts[0] != "tests"]
    sources += [path.read_text() for path in ROOT.glob("*.py")]
    declared = {code for source in sources for code in DECLARATION.findall(source)}
    assert declared == {each.code for each in error_classes()}
    assert set(re.findall(r"^### `(\w+)`$", messages_page(), re.MULTILINE)) >= declared


def test_every_error_class_has_a_message_a_cause_and_a_remedy_of_its_own() -> None:
    for each in error_classes():
        message, _, cause = (each.__doc__ or "").partition("\n\n")
        assert cause.strip(), f"{each.__name__}: the second paragraph of its docstring must state the cause."
        assert "\n" not in message.strip(), f"{each.__name__}: the message must be one line."
        assert vars(each).get("remedy", "").endswith("."), f"{each.__name__}: its `remedy` must be a sentence."


def test_no_two_error_classes_declare_the_same_code() -> None:
    codes = [each.code for each in error_classes()]
    assert sorted(codes) == sorted(set(codes))


@pytest.mark.parametrize(
    ("codes", "entries"), [(ErrorCode, TASK_FAILURES), (ReasonCode, REASONS_TO_WAIT), (AuditCode, OUTBOX_OUTCOMES)]
)
def test_every_code_of_an_enum_is_explained(codes: type[StrEnum], entries: Iterable[Entry]) -> None:
    assert [entry.code for entry in entries] == [str(code) for code in codes]
    assert all(entry.message and entry.cause and entry.remedy for entry in entries)


def test_every_sqlstate_that_our_functions_raise_is_explained() -> None:
    assert {entry.code for entry in SQLSTATES} == set(re.findall(r"'(CL\d+)'", SCHEMA.read_text()))


def test_an_error_raised_without_a_message_uses_the_first_line_of_its_docstring() -> None:
    assert CeleriacError().message == "Something went wrong."
