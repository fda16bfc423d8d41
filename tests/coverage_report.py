"""Print at the end of a test run what was skipped and why; fail in CI if a guarantee test was skipped."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator

import pytest

GUARANTEES = pytest.StashKey[set[str]]()
SKIPPED = pytest.StashKey[dict[str, str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[GUARANTEES] = set()
    config.stash[SKIPPED] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[GUARANTEES].update(item.nodeid for item in items if item.get_closest_marker("guarantee"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        item.config.stash[SKIPPED][item.nodeid] = reason.removeprefix("Skipped: ")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = config.stash[SKIPPED]
    if not skipped:
        return
    terminalreporter.section("SKIPPED IN THIS RUN", sep="!", yellow=True, bold=True)
    for reason in sorted(set(skipped.values())):
        count = sum(value == reason for value in skipped.values())
        terminalreporter.line(f"{count} test(s): {reason}", yellow=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    missing = sorted(session.config.stash[GUARANTEES] & session.config.stash[SKIPPED].keys())
    if missing and os.environ.get("CI") == "true" and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        sys.stderr.write("".join(f"A guarantee test was skipped in CI: {nodeid}\n" for nodeid in missing))
