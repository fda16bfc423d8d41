"""Fixtures of the outbox. Tests with `outbox` run on the embedded PostgreSQL and, if there is one, on another version.

Tests with `stack` or `database` instead run on the embedded one only.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine, make_url

import settings
from models.engine import make_engine
from outbox.relay import Relay
from tests.outbox.table import OutboxTable
from tests.servers import Cluster, ServersOfTests


@pytest.fixture(scope="session")
def engine_of_outbox(each_postgres: Cluster) -> Iterator[Engine]:
    """An engine whose statements do not wait for a lock for long: an unexpected wait fails the test."""
    url = make_url(each_postgres.url(each_postgres.migrated)).update_query_dict({"options": "-c lock_timeout=5s"})
    engine = make_engine(url.render_as_string(hide_password=False), pool_size=10)
    yield engine
    engine.dispose()


@pytest.fixture
def outbox(each_postgres: Cluster, engine_of_outbox: Engine) -> Iterator[OutboxTable]:
    table = OutboxTable(each_postgres, engine_of_outbox)
    table.empty()
    yield table
    table.close()


@pytest.fixture
def db(outbox: OutboxTable) -> Connection:
    return outbox.connect()


@pytest.fixture
def other(outbox: OutboxTable) -> Connection:
    return outbox.connect()


@pytest.fixture
def relay(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    monkeypatch.setenv("OUTBOX_RETRY_JITTER", "0")
    settings.current.cache_clear()
    relay = Relay.of(settings.current())
    yield relay
    relay.close()
