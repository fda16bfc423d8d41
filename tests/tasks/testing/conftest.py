"""A test as a user writes it: a session in a transaction that is rolled back, after which nothing is left anywhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from sqlalchemy import text
from sqlalchemy.orm import Session

from models.engine import engine
from models.sql import sql
from models.tables import Base
from tests.servers import ServersOfTests

INVOICE = text("CREATE TABLE public.invoice (number integer PRIMARY KEY, paid integer, CHECK (number < 1000))")


@pytest.fixture
def db(stack: ServersOfTests) -> Iterator[Session]:
    """Code that commits is welcome: with `create_savepoint` it commits savepoints. A superuser may move the clock."""
    with stack.cluster.superuser.connect() as connection:
        transaction = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            session.execute(INVOICE)
            yield session
        transaction.rollback()


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest, stack: ServersOfTests) -> Iterator[None]:
    """Set up before `db` is, and looks after it is gone."""
    yield
    assert left_in_the_ledger() == {}
    with redis.Redis.from_url(stack.addresses["BROKER_URL"]) as broker:
        assert broker.dbsize() == 0, "a message has left"


def left_in_the_ledger() -> dict[str, int]:
    """Rows by table, where there are any."""
    counts = " UNION ALL ".join(f"SELECT '{name}', count(*) FROM {name}" for name in Base.metadata.tables)
    with engine().begin() as connection:
        return {name: count for name, count in connection.execute(sql(counts)) if count}
