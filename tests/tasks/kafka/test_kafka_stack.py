"""With INGEST_QUEUE=kafka, `manage.py worker` is the Kafka worker, and `check` fails if nothing consumes the topic."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import checks.kafka
import commands
import settings
from checks.result import Level
from child_process import ChildProcess, await_ready
from settings import ROOT
from tasks.core.registry import handlers
from tests.servers import wait_until
from tests.tasks.kafka.conftest import PARTITIONS
from tests.tasks.kafka.topic import Topic, submitted_in_sql
from tests.tasks.registrations import registered
from tests.tasks.web import get
from tests.tasks.work import rows


@pytest.mark.guarantee
def test_check_fails_while_no_live_worker_consumes_the_topic(topic: Topic, tmp_path: Path) -> None:
    def level() -> Level:
        (finding,) = checks.kafka.check(settings.current())
        assert finding.name == "kafka"
        return finding.level

    def is_answered() -> bool:
        return CliRunner().invoke(commands.app, ["worker", "--ping"]).exit_code == 0

    registered(handlers())  # a Celery worker does not count, nor does a worker of another topic
    registered(handlers(), name="another:2-worker", topic="another")
    assert level() is Level.FAIL
    assert not is_answered()
    command = [sys.executable, str(ROOT / "manage.py"), "worker", "--processes", "1"]
    ready = tmp_path / "ready"
    child = ChildProcess("worker", command, log=tmp_path / "log", ready_file=ready, environment=dict(os.environ))
    try:
        await_ready([child], 60)
        wait_until(lambda: level() is Level.OK, "the worker has registered")
        assert is_answered()
    finally:
        child.end(30)
    assert level() is Level.FAIL


def test_one_scrape_counts_the_tasks_of_all_its_processes_and_every_line_of_them_is_json(
    topic: Topic, tmp_path: Path
) -> None:
    port = topic.stack.home.ports({"kafka-metrics": 0}, wished={})["kafka-metrics"]
    variables = {"LOG_FORMAT": "json", "WORKER_METRICS_PORT": str(port), "INGEST_HANDLERS": ""}
    command = [sys.executable, str(ROOT / "manage.py"), "kafka-worker", "--processes", "2", "--log-level", "info"]
    log, ready = tmp_path / "log", tmp_path / "ready"
    child = ChildProcess("worker", command, log=log, ready_file=ready, environment={**os.environ, **variables})

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in log.read_text().splitlines()]

    def processes() -> set[int]:
        return {line["process"] for line in lines() if line.get("event") == "tasks_succeeded"}

    sent = 0
    try:
        await_ready([child], 60)

        def both_have_run_tasks() -> bool:
            nonlocal sent
            for partition in range(PARTITIONS):
                topic.wakeup(submitted_in_sql(1, "demo.flaky"), partition)
                sent += 1
            wait_until(lambda: len(rows(where="status = 'SUCCEEDED'")) == sent, "they have succeeded", seconds=60)
            return len(processes()) == 2

        wait_until(both_have_run_tasks, "both processes have run tasks", seconds=60)
        scraped = get(port, "/metrics")[1]
    finally:
        child.end(30)
    assert f'celeriac_process_claims_total{{verdict="run"}} {sent}.0' in scraped
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines())
