"""With INGEST_QUEUE=kafka, `manage.py worker` is the Kafka worker, and `check` fails if nothing consumes the topic."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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
from tests.tasks.kafka.topic import Topic
from tests.tasks.registrations import registered


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
