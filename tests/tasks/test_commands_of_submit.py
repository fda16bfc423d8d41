"""submit, when somebody goes away or an envelope says more: nothing is left unsaid, and nothing is passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers import ServersOfTests
from tests.tasks import work
from tests.tasks.door import FLAKY, Done, started


def unread(*arguments: str) -> Done:
    """Into a pipe whose reader has gone."""
    with started("submit", FLAKY, *arguments) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        err = running.stderr.read()
    return Done(running.returncode, "", err)


@pytest.mark.parametrize(
    ("options", "lines", "left"),
    [
        (["--json"], 2500, "1,000 lines are submitted, the lines after line 1,001 are not."),
        (["--json"], 3, "3 lines are submitted."),
        ([], 1500, "1,500 lines are submitted."),
    ],
    ids=["half-way", "all of a few", "all, without JSON"],
)
def test_whoever_is_not_read_any_more_says_which_lines_are_submitted(
    stack: ServersOfTests, tmp_path: Path, options: list[str], lines: int, left: str
) -> None:
    file = tmp_path / "payloads.jsonl"
    file.write_text("\n" + "1\n" * lines)
    stopped = unread(f"@{file}", "--lines", *options)
    assert stopped.code == 1
    assert stopped.err == f"manage.py: Nobody reads what is printed here: {left}\n"
    assert f"{len(work.rows()):,} lines" in left
