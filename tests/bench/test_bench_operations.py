"""Test that `bench operations` measures what operators ask for, in a ledger of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from settings import ROOT
from tests.bench.test_bench_ingest import still_running


def test_bench_operations_measures_every_call_and_cleans_up(temporary: Path) -> None:
    few = ["--tasks", "1000", "--events", "100", "--tally", "100"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "bench", "operations", *few, "--json"],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert found.keys() == {"scrape of /metrics", "stats", "tasks, first page", "folding that minute"}
    assert all(0 < each["database"] <= each["whole"] for each in found.values())
    assert still_running(temporary) == []
    assert list(temporary.iterdir()) == []
