"""The probes: an API can be alive without being ready."""

from __future__ import annotations

import asyncio
import threading

import httpx2
import pytest
from fastapi.testclient import TestClient

import settings
from api import ledger_calls
from api.app import app
from api.tokens import Scope
from tasks.operations import installation_metrics
from tests.api.callers import Callers
from tests.outbox.publishers.case import stopped
from tests.servers import ServersOfTests


def test_an_api_with_an_unreachable_ledger_is_alive_and_not_ready(
    client: TestClient, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.get("/readyz").json() == {"status": "ready"}
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:hunter2@127.0.0.1:1/x")
    settings.current.cache_clear()
    assert client.get("/healthz").json() == {"status": "ok"}
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "unreachable"
    assert "hunter2" not in answer.text
    assert "127.0.0.1" not in answer.text


def test_an_api_with_an_unmigrated_ledger_is_not_ready(
    client: TestClient, stack: ServersOfTests, empty_database: str
) -> None:
    stack.home.write_stack({**stack.addresses, "DATABASE_URL": empty_database})
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "schema_mismatch"


def test_while_all_threads_wait_for_the_ledger_an_api_is_alive_and_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_calls, "SECONDS", 0.2)
    is_over = threading.Event()

    async def ask() -> list[int]:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://api") as client:
            return [(await asyncio.wait_for(client.get(path), 10)).status_code for path in ("/healthz", "/readyz")]

    waiting = [ledger_calls._threads.submit(is_over.wait) for _ in range(ledger_calls.THREADS)]
    try:
        assert asyncio.run(ask()) == [200, 503]
    finally:
        is_over.set()
    assert [each.result(10) for each in waiting] == [True] * ledger_calls.THREADS


def test_metrics_have_the_content_type_of_prometheus(client: TestClient) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_a_frozen_broker_is_not_reported_as_an_unreachable_ledger(callers: Callers, stack: ServersOfTests) -> None:
    operator = callers(Scope.OPERATE)
    with stopped(stack.running["redis-broker"].process):  # it accepts connections and does not answer
        text = operator.get("/metrics").text
        queues = operator.get("/internal/queues")
    assert "celeriac_ledger_unreachable 0.0" in text
    assert "celeriac_broker_unreachable 1.0" in text
    assert "ingest_task_dlq_total" in text, "the counters of the ledger are shown"
    assert queues.status_code == 200
    assert queues.json()["queues"][0]["messages"] is None
    assert "celeriac_broker_unreachable 0.0" in operator.get("/metrics").text


def test_a_frozen_ledger_is_reported_by_itself(
    client: TestClient, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_calls, "SECONDS", 0.5)
    locked = threading.Event()
    monkeypatch.setattr(installation_metrics, "read_totals", lambda _connection: locked.wait(5))
    text = client.get("/metrics").text
    locked.set()
    assert "celeriac_ledger_unreachable 1.0" in text
    assert "celeriac_broker_unreachable 1.0" not in text
