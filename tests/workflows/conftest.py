"""Fixtures for workflows: settings, and the HTTP server that their stages call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

import failpoint
import settings
from outbox.after_commit_publisher import after_commit_publisher
from tests.servers import ServersOfTests
from tests.workflows.flows import create_tables
from tests.workflows.outside import API_KEY, SECRET, Outside

Configure = Callable[..., None]


@pytest.fixture
def configure(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Change the settings of this process: variables, or the destinations by name."""

    def set_(destinations: dict[str, str] | None = None, **variables: str) -> None:
        if destinations is not None:
            variables["OUTBOX_DESTINATIONS"] = json.dumps(destinations)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        settings.current.cache_clear()

    return set_


@pytest.fixture
def outside(stack: ServersOfTests, configure: Configure) -> Iterator[Outside]:
    create_tables()
    outside = Outside()
    configure_for(configure, outside.port)
    yield outside
    outside.end()
    failpoint.arm()
    assert after_commit_publisher().wait_until_idle(20)


def configure_for(configure: Configure, port: int) -> None:
    crm = f"http://127.0.0.1:{port}/crm?allow_private=1&allow_http=1&secret={SECRET.replace(' ', '%20')}"
    stream = "redis-stream://127.0.0.1:1/0?stream=told"
    configure({"crm": crm, "told": stream}, LLM_BASE_URL=f"http://127.0.0.1:{port}/v1/", LLM_API_KEY=API_KEY)
