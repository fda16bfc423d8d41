"""Metrics of one process and of several: counting many values at once, and the folder of shared metrics."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

from commands.metrics_page import metrics_page
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


# Of the first source document, with their labels. Ours have more where they are bounded.
SPECIFIED = {
    "ingest_task_process_total": {"result"},
    "ingest_task_process_seconds": {"result"},
    "ingest_stream_length": {"stream"},
    "ingest_stream_pending": {"stream", "group"},
    "ingest_stream_reclaim_total": {"result"},
    "ingest_task_dlq_total": set(),
    "outbox_backlog": set(),
    "outbox_publish_total": {"result"},
    "outbox_publish_seconds": {"result"},
    "outbox_publish_delay_seconds": set(),
}


def test_every_specified_name_is_there_with_its_labels_and_each_name_has_one_exposer() -> None:
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| (.*?) \|", metrics_page(), re.MULTILINE)
    labels = {name: set(re.findall(r"\w+", text)) for name, text in rows}
    assert len(labels) == len(rows), "no name is exposed by the installation and by a program"
    assert {name: labels.get(name, set()) & wanted for name, wanted in SPECIFIED.items()} == SPECIFIED
    assert labels.keys() >= SPECIFIED.keys()
    assert all(name.startswith("celeriac_") for name in labels.keys() - SPECIFIED.keys())


def test_an_api_serves_the_metrics_of_its_process_on_a_port_of_their_own(stack: ServersOfTests) -> None:
    ports = stack.home.ports({"api": 0, "api-metrics": 0}, wished={})
    command = [sys.executable, "-m", "uvicorn", "api.app:app", f"--port={ports['api']}", "--log-level=error"]
    api = start(command, API_METRICS_PORT=str(ports["api-metrics"]))
    try:
        wait_until(lambda: get(ports["api"], "/healthz")[0] == 200, "the API answers", seconds=30)
        of_process, of_installation = (get(ports[name], "/metrics")[1] for name in ("api-metrics", "api"))
        assert "celeriac_process_waits_for_ledger" in of_process
        assert "celeriac_ledger_unreachable 0.0" in of_installation
        families = [set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)) for text in (of_process, of_installation)]
        assert not families[0] & families[1]
    finally:
        api.send_signal(signal.SIGTERM)
        finish(api)


def test_a_relay_serves_its_own_metrics(stack: ServersOfTests) -> None:
    port = stack.home.ports({"relay-metrics": 0}, wished={})["relay-metrics"]
    relay = start([sys.executable, str(ROOT / "manage.py"), "relay"], WORKER_METRICS_PORT=str(port))
    try:
        wait_until(lambda: get(port, "/metrics")[0] == 200, "its metrics are served")
        assert "celeriac_process_waits_for_ledger" in get(port, "/metrics")[1]
    finally:
        relay.send_signal(signal.SIGINT)
        finish(relay)
