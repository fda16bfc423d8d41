"""Fixtures for consumers of streams: a sink of each kind, and a stream whose handler writes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

import settings
from models.engine import engine
from receipts.streams import consume
from sinks.configuration import open_sinks
from tests.receipts.consuming import StreamUnderTest, point_at
from tests.receipts.log_server import LogServer
from tests.receipts.places import CREATE, EMPTY, PLACES, StreamPlace
from tests.receipts.receiving import Receiving
from tests.servers import ServersOfTests
from tests.sinks.conftest import configure, other, other_database  # noqa: F401 - fixtures

BATCH = 2
VARIABLES = {"CHECKPOINT_DEFER_ACK": "true", "RECEIPT_BATCH_SIZE": str(BATCH), "RECEIPT_BLOCK_MS": "50"}


@pytest.fixture
def checkpoint_settings(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> ServersOfTests:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    settings.current.cache_clear()
    monkeypatch.setattr(consume, "LARGEST_CHECKPOINT", BATCH)  # each batch is a checkpoint
    return ledger


@pytest.fixture(params=PLACES)
def place(
    request: pytest.FixtureRequest,
    checkpoint_settings: ServersOfTests,
    other: Engine,  # noqa: F811
    configure: Callable[..., None],  # noqa: F811
    tmp_path: Path,
) -> Iterator[StreamPlace]:
    """A sink of every kind that takes part in checkpoints."""
    made = PLACES[request.param](checkpoint_settings, other, tmp_path)
    configure(**{made.name: made.setting})
    for each in (engine(), other):
        with each.begin() as connection:
            connection.execute(text(f"{CREATE}; {EMPTY}"))
    open_sinks().find(made.name).prepare()
    yield made
    made.client.close()


@pytest.fixture
def stream(ledger: ServersOfTests, place: StreamPlace) -> Iterator[StreamUnderTest]:
    made = StreamUnderTest(ledger, place)
    yield made
    made.client.close()


@pytest.fixture
def without_checkpoints(place: StreamPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledge after each batch, as is the default."""
    monkeypatch.setenv("CHECKPOINT_DEFER_ACK", "false")
    settings.current.cache_clear()


def only(*names: str) -> pytest.MarkDecorator:
    """Run a test with these sinks instead of all."""
    return pytest.mark.parametrize("place", names, indirect=True)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let savers and deliverers read few entries at once, and not wait for long."""
    monkeypatch.setenv("RECEIPT_BATCH_SIZE", str(BATCH))
    monkeypatch.setenv("RECEIPT_BLOCK_MS", "50")
    settings.current.cache_clear()


@pytest.fixture
def receiving(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiving]:
    """An installation that answers `accepted`."""
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "true")
    settings.current.cache_clear()
    made = Receiving()
    yield made
    made.close()


@pytest.fixture
def log_server(ledger: ServersOfTests) -> Iterator[LogServer]:
    """A receipt log that a test may kill; this process uses it."""
    made = LogServer(ledger.home)
    made.start()
    with made.client() as client:
        client.flushall()
    point_at(ledger, REDIS_URL=made.url)
    yield made
    if made.child is not None:
        made.kill()
