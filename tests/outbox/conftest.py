"""The lease protocol is tested on the embedded PostgreSQL and on another version, where there is one.

Tests that take `stack` or `database` instead of `outbox` run on the embedded one alone.
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
    """Its connections do not wait for locks without end: where a statement should not wait, it fails soon."""
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
