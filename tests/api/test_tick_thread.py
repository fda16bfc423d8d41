"""API_RUN_TICKS=true: the API process runs the ticks where there is neither beat nor a system worker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import metrics
import settings
from api.tick_thread import TickThread
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import submit, ticks
from tasks.execution.deliver import deliver
from tests.outbox.ledger import move, woken
from tests.servers import ServersOfTests, wait_until
from tests.tasks.work import rows

FINISHED = sql("SELECT name FROM ledger.tick WHERE finished_at IS NOT NULL AND error IS NULL ORDER BY name")
UNREACHABLE = "postgresql://127.0.0.1:1/x"


@pytest.fixture
def api_process(stack: ServersOfTests, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the API as a process of its own. Its handlers are those of the tests, which it does not need."""
    environment = {**os.environ, "API_RUN_TICKS": "true", "OUTBOX_PUBLISH_INTERVAL_MS": "50"}
    command = [sys.executable, "-m", "uvicorn", "api.app:app", "--port=0", "--log-level=warning"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, cwd=settings.ROOT, env=environment, stderr=log) as running,
    ):
        yield running
        running.kill()


def test_a_retry_becomes_due_and_is_published_with_neither_beat_nor_a_system_worker(
    stack: ServersOfTests, api_process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGEST_RETRY_BASE_BACKOFF_MS", "600000")
    settings.current.cache_clear()
    with sessions().begin() as session:
        id_ = submit(session, "demo.flaky", {"fail": 1}).task_id
    assert after_commit_publisher().wait_until_idle(20)
    deliver(engine(), [id_])
    assert rows() == [("RETRYING", 1)]
    wait_until(lambda: finished() == sorted(ticks.TICKS), "every tick has run in the API process", seconds=60)
    first = woken(stack)
    assert [str(id_)] in first
    move(stack, 601)
    wait_until(lambda: len(woken(stack)) > len(first), "the wake-up of the retry is published")
    deliver(engine(), [id_])
    assert rows() == [("SUCCEEDED", 1)]
    api_process.send_signal(signal.SIGTERM)
    assert api_process.wait(20) in (0, -signal.SIGTERM)
    assert (tmp_path / "log").read_text() == ""


def test_an_outage_of_the_ledger_is_logged_once_and_the_ticks_go_on_afterwards(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("API_RUN_TICKS", "true")
    monkeypatch.setenv("OUTBOX_PUBLISH_INTERVAL_MS", "50")
    monkeypatch.setenv("DATABASE_URL", UNREACHABLE)
    settings.current.cache_clear()
    thread = TickThread()
    thread.start()
    try:
        for outage in (1, 2):
            failures = errors()
            wait_until(lambda: errors() >= failures + 3, "the relay has failed several times")  # noqa: B023
            logged = [getattr(each, "event", "") for each in caplog.records]
            assert logged == ["ledger_down", *["ledger_up", "ledger_down"] * (outage - 1)]
            monkeypatch.delenv("DATABASE_URL")
            settings.current.cache_clear()
            good = successes()
            wait_until(lambda: successes() >= good + 3, "the relay runs again")  # noqa: B023
            monkeypatch.setenv("DATABASE_URL", UNREACHABLE)
            settings.current.cache_clear()
        assert "this process waits for it: PostgreSQL at 127.0.0.1:1 is unreachable" in caplog.text
    finally:
        asyncio.run(thread.stop())
    assert not thread._thread.is_alive()
    monkeypatch.delenv("DATABASE_URL")


def test_without_the_setting_the_api_runs_no_ticks(client: TestClient) -> None:
    assert client.get("/healthz").status_code == 200
    assert "ticks" not in [thread.name for thread in threading.enumerate()]


def test_a_tick_that_fails_does_not_prevent_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(name: str) -> None:
        ran.append(name)
        if name == "relay":
            raise ValueError("on purpose")

    monkeypatch.setattr(ticks, "run", run)
    due = ticks.DueTicks()
    assert due.next_in_seconds() == 0
    with pytest.raises(ValueError, match="on purpose"):
        due.run_due()
    assert ran == list(ticks.TICKS)
    assert due.next_in_seconds() > 0
    due.run_due()
    assert ran == list(ticks.TICKS)


def finished() -> list[str]:
    with engine().connect() as connection:
        return list(connection.execute(FINISHED).scalars())


def errors() -> float:
    return _count("error")


def successes() -> float:
    return _count("ok")


def _count(result: str) -> float:
    return float(metrics.TICKS_TOTAL.labels("relay", result)._value.get())
