"""Test that the bench uses servers of its own and cleans up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bench.scratch import scratch_servers
from settings import ROOT, current
from tests.bench.test_bench_ingest import still_running


def test_the_bench_never_touches_the_servers_named_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # another bench may be running
    monkeypatch.setenv("DATABASE_URL", "postgresql://owner@127.0.0.1:1/precious")
    monkeypatch.setenv("BROKER_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/1")
    monkeypatch.setenv("OUTBOX_DESTINATIONS", "{}")
    current.cache_clear()
    with scratch_servers(stream="s") as settings:
        urls = [settings.database_url, settings.broker_url, settings.redis_url]
        assert not [url for url in urls if ":1/" in url]
        assert "stream=s" in settings.outbox_destinations["s"]
    assert os.environ["DATABASE_URL"] == "postgresql://owner@127.0.0.1:1/precious"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_bench_outbox_measures_everything_and_cleans_up(temporary: Path) -> None:
    few = ["--count", "1000", "--singles", "100", "--history", "50000", "--held-seconds", "2"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "bench", "outbox", *few, "--json"],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found.keys() == {"celery", "stream", "add", "delay", "claim", "held"}
    assert min(number for part in found.values() for number in part.values()) > 0
    assert still_running(temporary) == []
    assert list(temporary.iterdir()) == []
