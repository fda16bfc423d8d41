"""Who has given a sign of life, and who is late with it."""

from __future__ import annotations

import pytest

from models.engine import engine
from models.sql import sql
from tasks.core.holders import HOST
from tasks.core.registered_types import LIVE_SECONDS
from tasks.operations.inserted_rows import read_inserted
from tasks.operations.signs_of_life import TickLife, WorkerLife, read_ticks, read_workers
from tasks.recovery.tick_rows import BEAT, record_tick
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import submitted
from tests.tasks.registrations import handler_of, registered

pytestmark = pytest.mark.usefixtures("ledger")


def workers() -> list[WorkerLife]:
    """Return the workers of this test, without those that tests share."""
    with engine().connect() as connection:
        return [each for each in read_workers(connection) if not each.worker.startswith(HOST)]


def ticks() -> dict[str, TickLife]:
    with engine().connect() as connection:
        return {each.name: each for each in read_ticks(connection)}


def test_a_worker_is_shown_with_its_age_until_it_is_not_live_any_more(ledger: ServersOfTests) -> None:
    registered(handler_of("some.type"), consumed=["ingest"])
    (found,) = workers()
    assert (found.worker, found.queues, found.types, found.processes) == ("another:1-worker", ["ingest"], 1, None)
    move(ledger, LIVE_SECONDS - 5)
    (found,) = workers()
    assert LIVE_SECONDS - 5 <= found.seen.total_seconds() < LIVE_SECONDS
    assert abs((found.uptime - found.seen).total_seconds()) < 1
    move(ledger, 6)
    assert workers() == []


def test_a_tick_that_never_ran_or_not_for_some_of_its_intervals_is_late(ledger: ServersOfTests) -> None:
    assert list(ticks()) == ["beat", "relay", "reclaim", "tally", "prune", "schedules"]
    assert all(each.is_late and each.seen is None for each in ticks().values())
    with engine().begin() as connection:
        for name in (BEAT, "relay", "prune"):
            record_tick(connection, name, holder="w")
    assert [ticks()[name].is_late for name in (BEAT, "relay", "prune", "tally")] == [False, False, False, True]
    move(ledger, 21)
    assert [ticks()[name].is_late for name in (BEAT, "relay", "prune")] == [True, True, False]
    move(ledger, 220)
    assert ticks()["prune"].is_late


def test_the_error_of_the_last_run_is_shown() -> None:
    with engine().begin() as connection:
        record_tick(connection, "relay", holder="w")
        connection.execute(sql("UPDATE ledger.tick SET error = 'It failed.' WHERE name = 'relay'"))
    assert ticks()["relay"].error == "It failed."
    assert ticks()["tally"].error is None


def test_inserted_tasks_are_counted_by_postgresql() -> None:
    def inserted() -> int:
        with engine().connect() as connection:
            return read_inserted(connection).tasks

    before = inserted()
    submitted(25)
    with engine().begin() as connection:  # a backend reports at most once a second by itself
        connection.execute(sql("SELECT pg_stat_force_next_flush()"))
    wait_until(lambda: inserted() - before >= 25, "PostgreSQL has counted 25 rows")
