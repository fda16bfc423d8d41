"""The lease protocol is tested on the embedded PostgreSQL and on another version, where there is one.

Tests that take `stack` or `database` instead of `outbox` run on the embedded one alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection

from models.engine import make_engine
from tests.outbox.table import OutboxTable
from tests.servers import Cluster


@pytest.fixture
def outbox(each_postgres: Cluster) -> Iterator[OutboxTable]:
    table = OutboxTable(each_postgres, make_engine(each_postgres.url(each_postgres.migrated), pool_size=10))
    table.empty()
    yield table
    table.close()
    table.empty()  # its clock too: other tests share the database


@pytest.fixture
def db(outbox: OutboxTable) -> Connection:
    return outbox.connect()


@pytest.fixture
def other(outbox: OutboxTable) -> Connection:
    """A second connection. Where it should not wait, it fails soon instead."""
    return outbox.connect(lock_timeout="2s")
