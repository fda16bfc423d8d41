"""A transaction at REPEATABLE READ or above sees an old snapshot; it must not submit a pruned key again."""

from __future__ import annotations

import pytest
from sqlalchemy.exc import DBAPIError

import settings
from models.engine import engine
from models.ledger_outage import asks_to_repeat
from models.sql import sql
from tasks.recovery.prune import prune
from tests.servers import ServersOfTests
from tests.tasks.deliveries import scalar
from tests.tasks.submission.test_submit_keys import Lane, each_lane, finish_all, keyed


@each_lane
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_older_than_the_pruning_of_a_key_must_be_repeated(
    lane: Lane, level: str, stack: ServersOfTests
) -> None:
    with engine().begin() as connection:
        id_ = lane(connection, {"n": 1}, "k")
    finish_all()
    with engine().connect().execution_options(isolation_level=level) as old:
        assert old.execute(sql("SELECT count(*) FROM ledger.task_tombstone")).scalar_one() == 0
        prune(engine(), settings.current())
        with pytest.raises(DBAPIError) as refusal:
            lane(old, {"n": 1}, "k")
        assert asks_to_repeat(refusal.value)
        old.rollback()
        assert lane(old, {"n": 1}, "k") == id_
        assert lane(old, {"n": 1}, "another") is not None
        old.commit()
    assert keyed("idempotency_key") == [("another",)]
    assert scalar("SELECT array_agg(id) FROM ledger.task_tombstone") == [id_]
