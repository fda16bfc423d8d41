"""A session as a user's test has it: in a transaction that is rolled back, after which no row or message is left."""

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
    """Code under test may commit: `create_savepoint` turns that into a savepoint. A superuser may move the clock."""
    with stack.cluster.superuser.connect() as connection:
        transaction = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            session.execute(INVOICE)
            yield session
        transaction.rollback()


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest, stack: ServersOfTests) -> Iterator[None]:
    """Check this after the `db` fixture has ended: this fixture is set up first."""
    yield
    assert count_rows() == {}
    with redis.Redis.from_url(stack.addresses["BROKER_URL"]) as broker:
        assert broker.dbsize() == 0, "a message was published"


def count_rows() -> dict[str, int]:
    """Count the rows of each table of the ledger that is not empty."""
    counts = " UNION ALL ".join(f"SELECT '{name}', count(*) FROM {name}" for name in Base.metadata.tables)
    with engine().begin() as connection:
        return {name: count for name, count in connection.execute(sql(counts)) if count}
