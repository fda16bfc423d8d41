"""Fixtures: the console in this process, and behind a real server with a real browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Connection

from console import overview_figures
from console.login import failed_logins
from tasks.core import registered_types
from tasks.core.holders import HOST
from tests.api.server import Server
from tests.console.visits import visitor
from tests.servers import ServersOfTests


@pytest.fixture(autouse=True)
def _no_failed_logins(stack: ServersOfTests) -> None:
    failed_logins.forget()


@pytest.fixture(autouse=True)
def _no_shared_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the workers that other tests share: they register in the ledger of every test."""
    for module, name in ((overview_figures, "read_workers"), (registered_types, "live_workers")):
        monkeypatch.setattr(module, name, _without_shared(getattr(module, name)))


def _without_shared(read: Callable[[Connection], list[Any]]) -> Callable[[Connection], list[Any]]:
    return lambda connection: [each for each in read(connection) if not each.worker.startswith(HOST)]


@pytest.fixture
def guest(stack: ServersOfTests) -> TestClient:
    """A visitor that is not logged in."""
    return visitor()


@pytest.fixture
def server(stack: ServersOfTests) -> Iterator[Server]:
    server = Server()
    server.start()
    yield server
    server.stop()
