"""Alive is not the same as ready."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

import settings
from api.app import app
from tests.servers import ServersOfTests


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(app) as client:
        yield client


def test_an_api_whose_ledger_is_away_is_alive_and_not_ready(
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


def test_an_api_whose_schema_is_old_is_not_ready(
    client: TestClient, stack: ServersOfTests, empty_database: str
) -> None:
    stack.home.write_stack({**stack.addresses, "DATABASE_URL": empty_database})
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "schema_mismatch"


def test_metrics_are_served_as_prometheus_reads_them(client: TestClient) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
