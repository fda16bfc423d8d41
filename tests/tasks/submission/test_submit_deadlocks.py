"""A submit that is the victim of a deadlock says so, and its caller can repeat the transaction."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from models.engine import sessions
from models.errors import LedgerBusy
from models.sql import sql
from tasks import submit
from tests.outbox.table import pid
from tests.servers import ServersOfTests
from tests.tasks.deliveries import wait_until_blocked


@pytest.mark.parametrize("field", ["key", "partition_key"])
def test_a_deadlock_of_two_keys_in_opposite_orders_asks_the_caller_to_repeat_the_transaction(
    stack: ServersOfTests, field: str
) -> None:
    keys: dict[str, dict[str, Any]] = {name: {field: name} for name in "ab"}
    with Session(stack.cluster.superuser) as other, sessions()() as ours:
        other.execute(sql("SET LOCAL deadlock_timeout = '1min'"))  # so that the server ends ours
        other_pid = pid(other.connection())
        submit(other, "test.insert", 1, **keys["b"])
        submit(ours, "test.insert", 1, **keys["a"])
        thread = Thread(target=submit, args=(other, "test.insert", 1), kwargs=keys["a"])
        thread.start()
        wait_until_blocked(other_pid)
        with pytest.raises(LedgerBusy, match="repeat the whole transaction") as busy:
            submit(ours, "test.insert", 1, **keys["b"])
        ours.rollback()
        thread.join()
    cause = busy.value.__cause__
    assert isinstance(cause, DBAPIError)
    assert getattr(cause.orig, "pgcode", None) == "40P01"
    with sessions().begin() as again:
        assert all(submit(again, "test.insert", 1, **keys[name]).created for name in "ab")
