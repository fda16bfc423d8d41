"""Fixtures for sinks: another database, and one configured sink."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

import settings
from models.engine import engine
from sinks.configuration import open_sinks
from sinks.files import FileSink
from tests.servers import Cluster, ServersOfTests
from tests.sinks.places import CREATE, PLACES, Place, Surroundings

DATABASE = "sink"


@pytest.fixture(scope="session")
def other_database(postgres: Cluster) -> Iterator[Engine]:
    """A database beside the ledger's, with a table for effects."""
    postgres.server.create_database(DATABASE)
    other = create_engine(postgres.url(DATABASE), pool_size=2)
    with other.begin() as connection:
        connection.execute(text(CREATE))
    yield other
    other.dispose()


@pytest.fixture
def other(other_database: Engine) -> Iterator[Engine]:
    """That database, emptied. What a test leaves prepared there would hold back the horizon of the whole server."""
    with other_database.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        _roll_back_prepared(connection)
        connection.execute(text("DROP SCHEMA IF EXISTS celeriac_sink CASCADE; TRUNCATE public.effect"))
    yield other_database
    other_database.dispose()  # the test may have broken its connections
    with other_database.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        _roll_back_prepared(connection)


def _roll_back_prepared(connection: Connection) -> None:
    for gid in connection.scalars(text("SELECT gid FROM pg_prepared_xacts WHERE database = 'sink'")).all():
        connection.execute(text(f"ROLLBACK PREPARED '{gid}'"))


@pytest.fixture
def configure(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that sets SINKS and opens the sinks again."""

    def set_sinks(**sinks: dict[str, Any]) -> None:
        monkeypatch.setenv("SINKS", json.dumps(sinks))
        settings.current.cache_clear()
        with engine().begin() as connection:
            connection.execute(text(CREATE))
            connection.execute(text("DELETE FROM public.effect"))

    yield set_sinks
    if open_sinks.made is not None:
        open_sinks.made.close()


@pytest.fixture(params=PLACES)
def place(
    request: pytest.FixtureRequest,
    other: Engine,
    ledger: ServersOfTests,
    configure: Callable[..., None],
    tmp_path: Path,
) -> Iterator[Place]:
    """A sink of every kind, ready to be used."""
    made = PLACES[request.param](other)
    made.start(Surroundings(ledger, tmp_path))
    configure(**{made.name: made.setting})
    open_sinks().find(made.name).prepare()
    yield made
    made.stop()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty folder for a file sink."""
    root = tmp_path / "ex ports"
    root.mkdir()
    return root


@pytest.fixture
def sink(root: Path) -> FileSink:
    """That folder, prepared, without a ledger."""
    sink = FileSink("files", root.as_uri())
    sink.prepare()
    return sink
