"""The bench of async handlers compares short tasks beside long ones with short tasks alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.long_tasks import Run, goals
from settings import ROOT


@pytest.mark.parametrize(
    ("many", "reached"),
    [(Run("many", 100, 200, 0.89), 0.89), (Run("many", 950, 200, 0.6), 0.95)],
    ids=["too few places", "places enough"],
)
def test_many_long_tasks_are_judged_by_the_rate_or_by_the_places_that_were_in_use(many: Run, reached: float) -> None:
    runs = [Run("alone", 1000, 0, 0.5), Run("a few", 900, 2, 0.5), many]
    assert [(goal.reached, goal.is_met) for goal in goals(runs)] == [(0.9, True), (reached, reached >= 0.9)]


@pytest.mark.slow
def test_bench_async_runs_every_short_task_beside_the_long_ones() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "bench", "async", "--count", "1000", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)["found"]
    assert [run["long_tasks"] for run in found] == [0, 2, 10]
    assert all(run["short_per_second"] > 1000 / 30 for run in found), "the short tasks waited for long ones"
    assert all(0 < run["in_use"] <= 1 for run in found)
