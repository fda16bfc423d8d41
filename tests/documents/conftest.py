"""A server that stands in for Chroma, in the settings of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import settings
from tests.documents.chroma_server import ChromaServer, chroma_server
from tests.servers import ServersOfTests


@pytest.fixture
def chroma(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChromaServer]:
    with chroma_server() as server:
        monkeypatch.setenv("CHROMA_BASE_URL", server.url)
        settings.current.cache_clear()
        yield server
