"""Fixtures for submitting: handlers of the tests, sessions, and a relay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection
from sqlalchemy.orm import Session

import settings
from models.engine import engine, sessions
from outbox.relay import Relay
from tests.servers import ServersOfTests
from tests.tasks import work


@pytest.fixture(autouse=True)
def _handlers() -> None:
    work.register()


@pytest.fixture
def session(stack: ServersOfTests) -> Iterator[Session]:
    with sessions()() as session:
        yield session


@pytest.fixture
def connection(stack: ServersOfTests) -> Iterator[Connection]:
    with engine().connect() as connection:
        yield connection


@pytest.fixture
def relay(stack: ServersOfTests) -> Iterator[Relay]:
    relay = Relay.of(settings.current())
    yield relay
    relay.close()
