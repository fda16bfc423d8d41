"""Test that `bench console` loads every page in a ledger of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from console.pages import NAVIGATION
from settings import ROOT
from tests.bench.test_bench_ingest import still_running


def test_bench_console_loads_every_page_and_cleans_up(temporary: Path) -> None:
    few = ["--tasks", "1000", "--events", "100", "--tally", "100"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "bench", "console", *few, "--json"],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {each["path"]: each for each in json.loads(done.stdout)}
    assert found.keys() >= {entry.path for entry in NAVIGATION}
    assert min(each["seconds"] for each in found.values()) > 0
    assert min(each["size"] for each in found.values()) > 1000
    assert still_running(temporary) == []
    assert list(temporary.iterdir()) == []
