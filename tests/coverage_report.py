"""Print at the end of a test run what was skipped and why; fail in CI if a guarantee test was skipped."""

from __future__ import annotations

import os
import sys
from typing import Final

import pytest

_SKIPPED: Final[dict[str, str]] = {}
_SKIPPED_GUARANTEES: Final[set[str]] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note skipped tests. Under pytest-xdist the controller gets the reports of all its workers here."""
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _SKIPPED[report.nodeid] = reason.removeprefix("Skipped: ")
        if "guarantee" in report.keywords:
            _SKIPPED_GUARANTEES.add(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _SKIPPED:
        return
    terminalreporter.section("SKIPPED IN THIS RUN", sep="!", yellow=True, bold=True)
    for reason in sorted(set(_SKIPPED.values())):
        count = sum(value == reason for value in _SKIPPED.values())
        terminalreporter.line(f"{count} test(s): {reason}", yellow=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _SKIPPED_GUARANTEES and os.environ.get("CI") == "true" and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        missing = sorted(_SKIPPED_GUARANTEES)
        sys.stderr.write("".join(f"A guarantee test was skipped in CI: {nodeid}\n" for nodeid in missing))
