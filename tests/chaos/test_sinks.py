"""`manage.py chaos sinks` finds nothing wrong with the sinks, and finds each of five bugs that it is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from chaos.sink_bugs import Bug
from chaos.sink_places import KINDS
from settings import ROOT

FOUND = {
    Bug.FENCE_DROPPED: "happened more than once",
    Bug.ACK_BEFORE_COMMIT: "are lost",
    Bug.GID_REUSED: "did not end as SUCCEEDED",
    Bug.DEDUP_AFTER_EFFECT: "happened more than once",
    Bug.DECISION_AFTER_COMMIT: "happened more than once",
}


def chaos(crashes: int, *options: str, code: int) -> dict[str, Any]:
    """Run the command in a process of its own: it forks, and this process has threads."""
    command = [sys.executable, "manage.py", "chaos", "sinks", "--crashes", str(crashes), "--json", *options]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.guarantee
def test_two_hundred_crashes_double_and_lose_no_effect_and_leave_nothing_behind() -> None:
    found = chaos(200, "--seed", "1", code=0)
    counted = found["counted"]
    assert (counted["lost"], counted["doubled"], counted["unfinished"], counted["leftBehind"]) == ([], [], [], [])
    assert counted["effects"] >= counted["tasks"] > 100
    assert found["crashes"] >= 200
    windows = {where: times for where, times in found["hits"].items() if not where.endswith("a random moment")}
    assert min(windows.values()) >= 2, "every window was hit"
    assert {where.partition(":")[0] for where in windows} == {*KINDS, "recovery"}
    assert counted["refused"] > 0, "suspended workers have written too late"


def test_a_bug_makes_the_chaos_fail() -> None:
    found = chaos(100, "--seed", "1", "--bug", Bug.DEDUP_AFTER_EFFECT, code=1)
    assert FOUND[Bug.DEDUP_AFTER_EFFECT] in found["violations"][0]


@pytest.mark.slow
@pytest.mark.parametrize("bug", Bug)
def test_every_bug_is_found(bug: Bug) -> None:
    found = chaos(400, "--bug", bug, code=1)
    assert any(FOUND[bug] in violation for violation in found["violations"]), found["violations"]
