"""Test `manage.py bench ingest`: its arithmetic, its output, and that it cleans up."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.ingest import Found, Goal, goals
from bench.measure_system import Latency, Memory, Rate, pause, percentiles
from bench.peers import programs, raw_sql
from bench.peers.programs import PEERS_PYTHON, PeersMissing, require_peers
from commands.bench import _print_systems
from settings import ROOT
from tasks.core.outcomes import Succeeded
from tasks.execution.claim_statements import CLAIM
from tasks.execution.settle_statements import settling

FOUND = Found(
    plain=[Rate("plain, prefetch 1", 500), Rate("plain, prefetch 16", 400)],
    peers=[Rate("a peer", 1000), Rate("a better peer", 1600)],
    limit=Rate("raw SQL", 10_000),
    limit_task=Rate("raw SQL, one by one", 8000),
    task=Rate("ours", 6500),
    hundred=Rate("ours, a hundred", 4000),
    sqlalchemy=Rate("ours, SQLAlchemy", 5000),
    many=[Rate("ours, many", 9000), Rate("ours, many, larger", 7000)],
    keyed=Rate("ours, keyed", 3250),
    plain_one_by_one=200,
    one_by_one=599,
    one_by_one_in_sessions=400,
    plain_latency=Latency(3, 6),
    latency=Latency(6, 15.1),
    bare_insert=10_000,
    submit_many=6000,
    waiting=[Rate("plain, prefork", 10), Rate("plain, threads", 400), Rate("ours, async", 250)],
    memory=Memory(10, 100.0, 100, 110.0),
)


def still_running(folder: Path) -> list[str]:
    """Return the names of the processes that were started with this folder as TMPDIR."""
    return [
        process.info["name"]
        for process in psutil.process_iter(["name", "environ"])
        if (process.info["environ"] or {}).get("TMPDIR") == str(folder)
    ]


def test_a_goal_is_measured_against_the_better_setting_of_each_system() -> None:
    reached = {goal.what: goal for goal in goals(FOUND)}
    assert reached["per-task handler : plain Celery"] == Goal("per-task handler : plain Celery", 13, 13)
    assert reached["per-task handler : best peer"].reached == 6500 / 1600
    assert reached["many=True : raw SQL"].reached == 0.9
    assert reached["1,000 tasks that wait 200 ms, async, s"] == Goal(
        "1,000 tasks that wait 200 ms, async, s", 4, 4, at_most=True
    )


def test_a_goal_is_met_when_it_is_reached_exactly_and_missed_just_below() -> None:
    missed = [goal.what for goal in goals(FOUND) if not goal.is_met]
    assert missed == ["one by one : plain Celery", "submit → start, p99 : plain Celery"]


@pytest.mark.parametrize("found", [FOUND, dataclasses.replace(FOUND, peers=[], memory=None)], ids=["all", "alone"])
def test_every_measured_rate_is_printed(found: Found, capsys: pytest.CaptureFixture[str]) -> None:
    _print_systems(found)
    printed = capsys.readouterr().out
    assert all(
        rate.system in printed
        for rate in (
            *(
                *found.plain,
                *found.peers,
                found.limit,
                found.limit_task,
                found.task,
                found.hundred,
                found.sqlalchemy,
                found.keyed,
            ),
            *(*found.many, *found.waiting),
        )
    )


def test_a_part_that_was_not_measured_has_no_goal() -> None:
    alone = dataclasses.replace(FOUND, peers=[], memory=None)
    assert [goal.what for goal in goals(alone) if "peer" in goal.what or "memory" in goal.what] == []


def test_percentiles_leave_out_the_warm_up_and_keep_the_slowest() -> None:
    assert percentiles([9999.0] * 10 + [float(wait) for wait in range(90)]) == Latency(45, 89)


def test_effects_are_counted_rarely_at_first_and_often_near_the_end() -> None:
    """Each count slows down the system that is being measured."""
    pauses = [pause(found, 20_000, found / 1000) for found in (1000, 10_000, 19_000, 19_900, 19_999)]
    assert pauses == sorted(pauses, reverse=True)
    assert pauses[0] == 0.5
    assert pauses[-1] == 0.003
    assert 0 < pause(0, 20_000, 5.0) < 0.5


def test_the_raw_sql_limit_passes_every_parameter_of_our_statements() -> None:
    """Otherwise a missing parameter would be noticed only by a run of the whole bench."""
    token = str(uuid.uuid4())
    assert CLAIM.text.compile().params.keys() <= raw_sql.claiming(["a"], token).keys()
    assert settling(Succeeded).text.compile().params.keys() <= raw_sql.succeeding(["a"], token).keys()


def test_the_module_that_peers_import_needs_only_the_standard_library() -> None:
    """Our packages are not installed where the peers run; import-linter checks the peers' own modules."""
    imported = set[str]()
    for node in ast.walk(ast.parse((ROOT / "bench" / "peers" / "effect.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    assert {name.partition(".")[0] for name in imported} <= set(sys.stdlib_module_names)


def test_the_error_for_missing_peers_tells_how_to_install_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PEERS_PYTHON", tmp_path / "python")
    with pytest.raises(PeersMissing, match=r"`make bench-peers`.*--without-peers"):
        require_peers()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bench_ingest_measures_everything_and_cleans_up(temporary: Path) -> None:
    with_peers = PEERS_PYTHON.exists()
    few = ["--count", "1000", "--singles", "50", "--memory", "--memory-tasks", "2000"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "bench", "ingest", *few, "--json"]
        + ([] if with_peers else ["--without-peers"]),
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    found = output["found"]
    assert len(found["peers"]) == (6 if with_peers else 0)
    assert found.keys() == {field.name for field in dataclasses.fields(Found)}
    assert min(numbers(found)) > 0
    assert len(output["goals"]) == (11 if with_peers else 10)
    assert still_running(temporary) == []
    assert list(temporary.iterdir()) == []


def numbers(found: Any) -> Iterator[float]:
    match found:
        case dict():
            for value in found.values():
                yield from numbers(value)
        case list():
            for value in found:
                yield from numbers(value)
        case int() | float():
            yield found
