"""Metrics of one process and of several: counting many values at once, and the folder of shared metrics."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

from metrics import observe_many
from settings import ROOT
from tests.nodes.programs import environment, finish, start
from tests.servers import ServersOfTests, wait_until
from tests.tasks.web import get

VALUES = [0.0, 0.001, 0.005, 0.005001, 0.3, 9.999, 10.0, 11.0, 1e9, -1.0]


def count(name: str, observe: Callable[[Histogram, Iterable[float]], Any]) -> list[tuple[str, str, float]]:
    histogram = Histogram(name, "for this test", buckets=(0.005, 0.3, 10), registry=CollectorRegistry())
    observe(histogram, VALUES)
    observe(histogram, [])
    (family,) = histogram.collect()
    samples = [(sample.name.removeprefix(name), sample.labels.get("le", ""), sample.value) for sample in family.samples]
    return [sample for sample in samples if not sample[0].endswith("_created")]


def test_observing_many_values_at_once_equals_observing_each() -> None:
    one_by_one = count("one_by_one", lambda histogram, values: list(map(histogram.observe, values)))
    assert count("at_once", observe_many) == one_by_one
    assert ("_bucket", "+Inf", 10.0) in one_by_one


def test_an_application_that_imports_tasks_and_gets_sigterm_leaves_no_folder_behind(tmp_path: Path) -> None:
    """SIGTERM ends it at once: nothing that it would remove at its exit is removed."""
    program = "import time, tasks, tasks.celery, tasks.celery_tasks; print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment(TMPDIR=str(tmp_path), BROKER_URL="redis://127.0.0.1:1/0"),
        stdout=subprocess.PIPE,
        text=True,
    ) as application:
        assert application.stdout
        assert application.stdout.readline() == "ready\n"
        application.terminate()
        assert application.wait(10) == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_relay_serves_its_own_metrics(stack: ServersOfTests) -> None:
    port = stack.home.ports({"relay-metrics": 0}, wished={})["relay-metrics"]
    relay = start([sys.executable, str(ROOT / "manage.py"), "relay"], WORKER_METRICS_PORT=str(port))
    try:
        wait_until(lambda: get(port, "/metrics")[0] == 200, "its metrics are served")
        assert "celeriac_process_waits_for_ledger" in get(port, "/metrics")[1]
    finally:
        relay.send_signal(signal.SIGINT)
        finish(relay)
