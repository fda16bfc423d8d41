"""Gauges of the ledger that need a second connection to be tested."""

from __future__ import annotations

import pytest

from models.engine import engine
from models.sql import sql
from tasks.operations.gauges import read_gauges
from tests.servers import ServersOfTests, wait_until

pytestmark = pytest.mark.usefixtures("ledger")


def test_a_transaction_of_another_role_holds_the_horizon_back(stack: ServersOfTests) -> None:
    """It keeps vacuum from removing dead rows, whichever role has begun it."""

    def horizon() -> float:
        with engine().connect() as connection:
            return read_gauges(connection).horizon

    with stack.cluster.superuser.connect().execution_options(isolation_level="REPEATABLE READ") as other:
        other.execute(sql("SELECT 1"))  # the snapshot of the whole transaction
        wait_until(lambda: horizon() > 1, "the age of the other transaction is shown")
        other.rollback()
    assert horizon() < 1
