"""Fixtures for the ledger. Its tests run on the embedded PostgreSQL and, if there is one, on another version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine

import settings
from models.engine import make_engine
from tests.servers import Cluster


@pytest.fixture(scope="session")
def postgres(each_postgres: Cluster) -> Cluster:
    return each_postgres


@pytest.fixture
def empty(empty_database: str) -> Iterator[Engine]:
    """An engine for a database without our schema."""
    engine = make_engine(empty_database)
    yield engine
    engine.dispose()
    settings.current.cache_clear()  # a test may have changed LEDGER_SCHEMA


@pytest.fixture
def owner(database: str) -> Iterator[Engine]:
    """An engine for the migrated, empty database, with the role that owns its tables."""
    engine = make_engine(database)
    yield engine
    engine.dispose()


@pytest.fixture
def connection(owner: Engine) -> Iterator[Connection]:
    with owner.connect() as connection:
        yield connection
