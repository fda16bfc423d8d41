"""The API in this process, and tokens for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from api.app import app
from outbox.after_commit_publisher import submitter
from tests.api.callers import Callers
from tests.servers import ServersOfTests


@pytest.fixture
def client(stack: ServersOfTests) -> Iterator[TestClient]:
    """Unexpected failures are answered, as a server would, not raised into the test."""
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def callers(client: TestClient) -> Callers:
    return Callers(client)


@pytest.fixture(autouse=True)
def _submitter_has_finished() -> Iterator[None]:
    """What a test has handed over is published before the next one empties the tables; no test leaves a connection."""
    yield
    if left := submitter.made:
        left.flush()
        left._engine.dispose()
