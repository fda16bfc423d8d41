"""The probes: an API can be alive without being ready."""

from __future__ import annotations

import asyncio

import anyio.to_thread
import httpx2
import pytest
from fastapi.testclient import TestClient

import settings
from api.app import app
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


def test_an_api_with_an_unmigrated_ledger_is_not_ready(
    client: TestClient, stack: ServersOfTests, empty_database: str
) -> None:
    stack.home.write_stack({**stack.addresses, "DATABASE_URL": empty_database})
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "schema_mismatch"


def test_healthz_answers_while_all_threads_wait_for_the_ledger() -> None:
    async def ask() -> int:
        limiter = anyio.to_thread.current_default_thread_limiter()
        for _ in range(int(limiter.total_tokens)):
            limiter.acquire_on_behalf_of_nowait(object())
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://api") as client:
            return (await asyncio.wait_for(client.get("/healthz"), 10)).status_code

    assert asyncio.run(ask()) == 200


def test_metrics_have_the_content_type_of_prometheus(client: TestClient) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
