"""Gauges of the ledger that need a second connection to be tested."""

from __future__ import annotations

import pytest

import settings
from models.engine import engine
from models.sql import sql
from tasks.operations import gauges
from tasks.operations.gauges import read_gauges
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import submitted

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def test_unsent_events_are_counted_up_to_a_ceiling_and_estimated_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = sql("INSERT INTO ledger.outbox_event (destination, payload) SELECT 'd', '1' FROM generate_series(1, :n)")

    def unsent() -> int:
        with engine().connect() as connection:
            return read_gauges(connection).unsent_events

    monkeypatch.setattr(gauges, "EVENTS_CEILING", 30)
    with engine().begin() as connection:
        connection.execute(insert, {"n": 29})
    assert unsent() == 29
    with engine().begin() as connection:
        connection.execute(insert, {"n": 20})
    assert unsent() == 30, "nothing was analysed, so nothing is known beyond the ceiling"
    with engine().begin() as connection:
        connection.execute(sql("ANALYZE ledger.outbox_event"))
    assert unsent() == 49


def test_a_queue_with_due_tasks_that_no_worker_has_ever_known_is_shown_without_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The alert CeleriacNoWorker needs both figures, most of all in an installation whose workers cannot start."""
    monkeypatch.setenv("INGEST_QUEUES", "ingest,reports")
    settings.current.cache_clear()
    submitted(1, queue="reports")
    with engine().connect() as connection:
        found = read_gauges(connection)
    assert found.oldest_due["reports"] >= 0
    assert (found.workers.get("reports"), found.running.get("reports")) == (0, 0)


def test_a_transaction_of_another_role_holds_the_horizon_back(stack: ServersOfTests) -> None:
    """It keeps vacuum from removing dead rows, whichever role has begun it."""

    def horizon() -> float:
        with engine().connect() as connection:
            return read_gauges(connection).horizon

    with stack.cluster.superuser.connect() as connection:  # tests before have cut off or suspended their connections
        connection.execute(
            sql("""
                SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
                  AND pid <> pg_backend_pid() AND backend_type = 'client backend'
            """)
        )
        assert connection.execute(sql("SELECT gid FROM pg_prepared_xacts")).all() == []
    wait_until(lambda: horizon() < 1, "the transactions of earlier tests have ended")
    with stack.cluster.superuser.connect().execution_options(isolation_level="REPEATABLE READ") as other:
        other.execute(sql("SELECT 1"))  # the snapshot of the whole transaction
        wait_until(lambda: horizon() > 1, "the age of the other transaction is shown")
        other.rollback()
    assert horizon() < 1
