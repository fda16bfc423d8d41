"""Test `manage.py bench recovery`: its arithmetic, and that it measures everything and cleans up."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.recovery import Drain, Found, Loss, goals, percentiles
from settings import ROOT
from tests.bench.test_bench_ingest import numbers, still_running

FOUND = Found(
    outage_seconds=10,
    claim_wanted_seconds=15,
    lease_seconds=3,
    drains=[
        Drain("PostgreSQL unreachable", 1000, 800, first_claim_seconds=15, cpu=1.1, charged=0),
        Drain("FLUSHALL", 1000, 799, first_claim_seconds=15.1, cpu=1.2, charged=1),
    ],
    child=Loss(100, 0.5, 1.0, wanted_seconds=1),
    worker=Loss(100, 4.0, 7.1, wanted_seconds=7),
)


def test_a_goal_is_met_when_it_is_reached_exactly_and_missed_just_below() -> None:
    assert [goal.what for goal in goals(FOUND) if not goal.is_met] == [
        "drain after FLUSHALL : undisturbed",
        "first claim after FLUSHALL, s",
        "tasks charged for FLUSHALL",
        "tasks of a lost worker run again, p99 s",
    ]


def test_the_slowest_of_a_hundred_waits_is_not_left_out() -> None:
    assert percentiles([float(wait) for wait in range(100)], 7) == Loss(100, 50, 99, 7)


def measured(temporary: Path, *options: str) -> dict[str, Any]:
    """Run the bench as a program; return what it prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "bench", "recovery", "--rounds", "1", *options, "--json"],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output: dict[str, Any] = json.loads(done.stdout)
    return output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bench_recovery_measures_everything_and_cleans_up(temporary: Path) -> None:
    output = measured(temporary, "--count", "1000", "--outage-seconds", "2")
    found = output["found"]
    assert found.keys() == {field.name for field in dataclasses.fields(Found)}
    assert [drain.pop("charged") for drain in found["drains"]] == [0, 0, 0]
    assert min(numbers(found)) > 0
    assert len(output["goals"]) == 11
    assert still_running(temporary) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_after_every_outage_a_backlog_is_drained_at_four_fifths_of_the_undisturbed_rate(temporary: Path) -> None:
    """A pause in the drain, such as a wait for the next tick, costs more than the fifth that is allowed."""
    drains = measured(temporary, "--count", "20000", "--outage-seconds", "5")["found"]["drains"]
    ratios = {drain["outage"]: drain["per_second"] / drain["undisturbed"] for drain in drains}
    assert ratios.keys() == {"PostgreSQL unreachable", "FLUSHALL", "both"}
    assert {outage: ratio for outage, ratio in ratios.items() if ratio < 0.8} == {}, json.dumps(drains, indent=1)
