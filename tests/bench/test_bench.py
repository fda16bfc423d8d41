"""The bench measures real work on servers of its own, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from settings import ROOT


@pytest.mark.slow
def test_the_bench_of_the_outbox_measures_and_cleans_up() -> None:
    before = set(Path(tempfile.gettempdir()).glob("celeriac-bench-*"))
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "bench", "outbox", "--count", "1000", "--singles", "100", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found.keys() >= {"textbook", "bare", "ours", "add_p50_ms", "delay_p99_ms"}
    assert min(found.values()) > 0
    assert set(Path(tempfile.gettempdir()).glob("celeriac-bench-*")) == before
