"""Fixtures for tests of the chat: settings, and two users who are connected."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import settings
from api.tokens import Scope
from tests.api.callers import make_token
from tests.api.chat_clients import ChatClient
from tests.api.server import Server
from tests.servers import ServersOfTests

Configure = Callable[..., None]


@pytest.fixture
def configure(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Configure:
    def set_variables(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        settings.current.cache_clear()

    return set_variables


@pytest.fixture
def two_phase(configure: Configure) -> None:
    configure(RECEIPT_TWO_PHASE_ENABLED="true")


@pytest.fixture
def token(ledger: ServersOfTests) -> str:
    return make_token("ann", Scope.CHAT)


@pytest.fixture
def ann(server: Server, token: str) -> Iterator[ChatClient]:
    with ChatClient.open(server.port, token) as client:
        yield client


@pytest.fixture
def bob(server: Server) -> Iterator[ChatClient]:
    with ChatClient.open(server.port, make_token("bob", Scope.CHAT)) as client:
        client.read_until_cursor()  # it is subscribed
        yield client
