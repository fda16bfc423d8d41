"""The metrics of the API process itself, beside those of the installation."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import settings
from tests.servers import ServersOfTests, wait_until
from tests.tasks.web import get

HOST = "127.0.0.2"  # loopback, as 127.0.0.1 is


def test_the_api_serves_its_own_metrics_on_the_address_and_port_of_the_settings(
    stack: ServersOfTests, tmp_path: Path
) -> None:
    port = stack.home.ports({"api-metrics": 0}, wished={})["api-metrics"]
    environment = {**os.environ, "API_METRICS_PORT": str(port), "METRICS_HOST": HOST}
    command = [sys.executable, "-m", "uvicorn", "api.app:app", "--port=0", "--log-level=warning"]
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def text() -> str:
        try:
            with direct.open(f"http://{HOST}:{port}/metrics", timeout=5) as answer:
                return str(answer.read().decode())
        except urllib.error.URLError:
            return ""

    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, cwd=settings.ROOT, env=environment, stderr=log) as running,
    ):
        try:
            wait_until(text, "its metrics are served", seconds=60)
            assert "celeriac_process_waits_for_ledger" in text()
            assert "ingest_task_process_total" not in text(), "that is about the installation"
            assert get(port, "/metrics")[0] == 0, "it listens on the given address only"
        finally:
            running.kill()
