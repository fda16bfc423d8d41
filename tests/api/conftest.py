"""Fixtures: the API in this process, and clients with tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from api.app import app
from tests.api.callers import Callers
from tests.api.chat_fixtures import ann, bob, configure, token, two_phase  # noqa: F401 - fixtures
from tests.api.server import Server
from tests.servers import ServersOfTests


@pytest.fixture
def client(stack: ServersOfTests) -> Iterator[TestClient]:
    """Return a client to which unexpected errors are answered, as by a server, instead of raised into the test."""
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def server(stack: ServersOfTests) -> Iterator[Server]:
    server = Server()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def callers(client: TestClient) -> Callers:
    return Callers(client)
