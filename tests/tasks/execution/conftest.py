"""Fixtures for tests of the execution path: a connection to the ledger that breaks, and async handlers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

import settings
from models import ledger_outage
from models.engine import make_engine
from tasks.execution import run_async
from tests.servers import ServersOfTests
from tests.tasks.ledger_line import Line


@pytest.fixture
def line(stack: ServersOfTests) -> Iterator[Line]:
    line = Line(settings.current().database_url)
    yield line
    line.close()


@pytest.fixture
def through_the_line(line: Line) -> Iterator[Engine]:
    made = make_engine(line.url)
    yield made
    made.dispose()


@pytest.fixture
def outage(line: Line, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Bring the ledger back after the fifth attempt to reach it. Returns the attempts that failed."""
    failures: list[str] = []
    note_failure = ledger_outage.outage.note_failure

    def note(error: BaseException) -> None:
        failures.append(type(error).__name__)
        line.is_down = len(failures) < 5
        note_failure(error)

    monkeypatch.setattr(ledger_outage.outage, "note_failure", note)
    return failures


@pytest.fixture
def no_refill(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which a task becomes due again while others run, and must not run again in the same message."""
    monkeypatch.setattr(run_async, "REFILL_SECONDS", 0.0)
