"""handlers, and submitting types that only the ledger knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core.limits import Limits, Rate
from tests.tasks import work
from tests.tasks.command_line import manage
from tests.tasks.registrations import handler_of, registered

pytestmark = pytest.mark.usefixtures("stack")


def test_types_are_listed_with_their_settings_and_the_live_workers_that_know_them() -> None:
    limits = Limits("mail.send", 5, Rate(100, "m"), "tenant")
    declared = handler_of("mail.send", queue="slow", max_attempts=3, batch=7, priority=8, limits=limits)
    registered(declared, name="one:1", ingest_queues=("ingest", "slow"), consumed=("slow",))
    registered({**declared, **handler_of("mail.read")}, name="two:1", ingest_queues=("ingest", "slow"))
    gone = registered(handler_of("mail.sort"), name="three:1")
    gone.end()
    found = {each["type"]: each for each in manage("handlers", "--json").json}
    assert found["mail.send"]["seenAt"]
    del found["mail.send"]["seenAt"]
    assert found["mail.send"] == {
        "type": "mail.send", "queue": "slow", "maxAttempts": 3, "batch": 7, "priority": 8,
        "maxRunning": 5, "rate": "100/m", "limitBy": "tenant", "workers": ["one:1", "two:1"],
    }  # fmt: skip
    assert (found["mail.read"]["workers"], found["mail.sort"]["workers"]) == (["two:1"], [])
    lines = {line.split()[0]: line.split()[1:] for line in manage("handlers").out.splitlines() if line.strip()}
    assert lines["mail.send"] == ["slow", "3", "7", "8", "100/m,", "5", "running", "per", "tenant", "one:1,", "two:1"]
    assert lines["mail.sort"] == ["ingest", "10", "1000", "5", "none"]


def test_lines_of_a_type_that_only_the_ledger_knows_are_submitted_and_unknown_ones_are_found_before_the_first(
    tmp_path: Path,
) -> None:
    registered(handler_of("mail.send", max_attempts=3))
    file = tmp_path / "lines.jsonl"
    file.write_text("1\n2\n")
    assert manage("submit", "mail.send", f"@{file}", "--lines").code == 0
    assert work.rows("type, max_attempts") == [("mail.send", 3)] * 2
    file.write_text('{"type": "mail.send"}\n{"type": "mail.sned"}\n')
    done = manage("submit", "--envelopes", f"@{file}", "--lines")
    assert (done.code, len(work.rows())) == (2, 2)
    assert "line 2: There is no handler for 'mail.sned'" in done.err
