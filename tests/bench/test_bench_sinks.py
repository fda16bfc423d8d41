"""The bench of sinks compares every kind with a committed INSERT, and says which goals are met."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.sinks import ATOMIC, SINKS, WANTED, Cost, Found, costs, goals, summarize
from settings import ROOT


def test_a_goal_is_met_at_its_number_and_missed_above_it() -> None:
    found = Found(1.0, [Cost("keyed PostgreSQL", 1.5, 1.5), Cost("two-phase PostgreSQL", 5.1, 5.1)])
    assert [(goal.reached, goal.is_met) for goal in goals(found)] == [(1.5, True), (5.1, False)]


def test_kinds_without_a_goal_are_measured_and_not_judged() -> None:
    assert goals(Found(1.0, [Cost("Redis list", 9.0, 9.0)])) == []


def test_a_ratio_compares_figures_of_the_same_round() -> None:
    """The machine was three times as slow in the second round, which changes no ratio."""
    rounds = [costs({"nothing": 1 * slow, "INSERT": 2 * slow, ATOMIC: 0.5 * slow, "a": 3 * slow}) for slow in (1, 3, 1)]
    found = summarize(rounds)
    assert found.insert_ms == 1
    assert [(cost.sink, cost.ms, cost.inserts) for cost in found.costs] == [(ATOMIC, 0.5, 0.5), ("a", 2, 2)]


@pytest.mark.slow
def test_bench_sinks_measures_every_kind() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "bench", "sinks", "--count", "100", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    kinds = {kind for kind, _ in SINKS.values()} | {ATOMIC}
    assert {cost["sink"] for cost in found["found"]["costs"]} == kinds
    assert min(cost["ms"] for cost in found["found"]["costs"]) > 0
    assert len(found["goals"]) == len(WANTED)
