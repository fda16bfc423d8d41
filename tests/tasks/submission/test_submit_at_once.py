"""Submitting through an engine: a transaction by itself, committed when the call returns, and nothing else in it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from psycopg2.extensions import TRANSACTION_STATUS_IDLE
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import DBAPIError, IntegrityError

import settings
from models.engine import engine, is_at_once, make_engine
from models.errors import Unreachable
from models.sql import sql
from models.status import TaskStatus
from outbox.after_commit_publisher import submitter
from tasks import IdempotencyConflict, NewTask, submit, submit_many
from tasks.execution.limits import SoftTimeLimit
from tests.outbox.ledger import arrived
from tests.servers import ServersOfTests
from tests.tasks import work
from tests.tasks.deliveries import scalar, wait_until_blocked
from tests.tasks.work import rows, transitions, wakeups

pytestmark = pytest.mark.usefixtures("stack")
BACKENDS = "SELECT max(pid) FROM pg_stat_activity WHERE application_name = 'at once' AND state = 'active'"


@pytest.fixture(autouse=True)
def _handlers(stack: ServersOfTests) -> None:
    work.register()


@pytest.fixture(params=["ours", "ours, nothing prepared", "somebody else's"])
def ledger(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Of any make: with one connection, so that whatever is left in it would be met by the next."""
    url = settings.current().database_url
    if request.param == "somebody else's":
        made = create_engine(url, pool_size=1, max_overflow=0, connect_args={"application_name": "at once"})
    else:
        made = make_engine(url, pool_size=1, max_overflow=0, application_name="at once")
    if request.param == "ours, nothing prepared":
        monkeypatch.setenv("LEDGER_PREPARED_STATEMENTS", "false")
        settings.current.cache_clear()
    yield made
    made.dispose()


def test_it_is_in_the_ledger_when_the_call_returns_and_its_wakeup_is_published(
    ledger: Engine, stack: ServersOfTests
) -> None:
    found = submit(ledger, "test.insert", {"n": 1}, priority=7)
    assert found.created
    assert rows("status, priority") == [("QUEUED", 7)]
    assert [to for _from, to, *_ in transitions(found.task_id)] == ["QUEUED"]
    assert len(wakeups()) == 1
    assert submitter().flush(10)
    assert arrived(stack) == {str(found.task_id): 1}


def test_a_key_means_what_it_means_in_a_session(ledger: Engine) -> None:
    first = submit(ledger, "test.insert", {"n": 1}, key="k")
    again = submit(ledger, "test.insert", {"n": 1}, key="k")
    assert (again.task_id, again.status, again.created) == (first.task_id, TaskStatus.QUEUED, False)
    with pytest.raises(IdempotencyConflict) as refused:
        submit(ledger, "test.insert", {"n": 2}, key="k")
    assert refused.value.task_id == first.task_id
    assert len(rows()) == len(wakeups()) == 1


def test_many_are_one_transaction(ledger: Engine, stack: ServersOfTests) -> None:
    taken = submit(ledger, "test.insert", "first", key="taken").task_id
    with pytest.raises(IdempotencyConflict):
        submit_many(ledger, [NewTask("test.insert"), NewTask("test.insert", "another", key="taken")])
    assert rows("id") == [(taken,)]
    more = submit_many(ledger, [NewTask("test.insert", n) for n in range(3)])
    assert submitter().flush(10)
    assert sorted(arrived(stack)) == sorted(map(str, [taken, *(each.task_id for each in more)]))


def test_the_connection_goes_back_as_it_was(ledger: Engine) -> None:
    submit(ledger, "test.insert")
    with ledger.connect() as connection:
        driver = connection.connection.dbapi_connection
        assert driver is not None
        assert (driver.autocommit, driver.get_transaction_status()) == (False, TRANSACTION_STATUS_IDLE)
        connection.execute(sql("DELETE FROM ledger.ingest_task"))
        connection.rollback()
    assert len(rows()) == 1


def test_an_engine_that_commits_every_statement_stays_one() -> None:
    """Or what is written through it afterwards would be rolled back in silence."""
    made = make_engine(settings.current().database_url, isolation_level="AUTOCOMMIT", pool_size=1, max_overflow=0)
    submit(made, "test.insert")
    with made.connect() as connection:
        connection.execute(sql("DELETE FROM ledger.ingest_task"))
    made.dispose()
    assert rows() == []


def test_a_time_limit_that_strikes_anywhere_leaves_the_connection_and_the_submitter_good() -> None:
    """Wherever Python looks for signals: at the beginning of a function, and after one that is written in C."""
    made = make_engine(settings.current().database_url, pool_size=1, max_overflow=-1)
    for _ in range(2):
        submit(made, "test.insert")
    place = 0
    while _is_struck(place := place + 1, lambda: submit(made, "test.insert")):
        other = threading.Thread(target=submit, args=(engine(), "test.insert"), daemon=True)
        other.start()  # with another pool: one of SQLAlchemy that is struck may stay locked, and that is not our doing
        other.join(10)
        assert not other.is_alive(), f"struck at {place}, and the next one waits for ever"
        with made.connect() as connection:
            driver: Any = connection.connection.dbapi_connection
            assert (driver.autocommit, driver.get_transaction_status()) == (False, TRANSACTION_STATUS_IDLE), place
            assert not is_at_once(connection), place
        if made.pool.checkedout():  # type: ignore[attr-defined]
            made.dispose()  # SQLAlchemy itself forgets one that is struck while it goes out or comes back
        assert submit(made, "test.insert").created, place
    assert place > 100
    made.dispose()


def _is_struck(place: int, function: Callable[[], object]) -> bool:
    """Calls it, and strikes at that place, counted from 1. False: it was over before."""
    passed = 0

    def strike(_frame: object, event: str, _argument: object) -> None:
        nonlocal passed
        passed += event in ("call", "c_return")
        if passed == place:
            sys.setprofile(None)
            raise SoftTimeLimit(1)

    try:
        sys.setprofile(strike)
        function()
    except SoftTimeLimit:
        pass
    finally:
        sys.setprofile(None)
    return passed >= place


def test_a_refusal_of_the_database_is_what_it_is_in_a_session_and_the_connection_stays_good(ledger: Engine) -> None:
    with engine().begin() as connection:
        connection.execute(sql("ALTER TABLE ledger.ingest_task ADD CONSTRAINT no_sevens CHECK (priority <> 7)"))
    try:
        for _ in range(2):
            with pytest.raises(IntegrityError, match="no_sevens") as refused:
                submit(ledger, "test.insert", {"secret": 1}, priority=7)
            assert not refused.value.connection_invalidated
            assert submit(ledger, "test.insert").created
    finally:
        with engine().begin() as connection:
            connection.execute(sql("ALTER TABLE ledger.ingest_task DROP CONSTRAINT no_sevens"))
    assert len(rows()) == len(wakeups()) == 2


def test_a_connection_that_breaks_is_said_and_the_next_call_has_a_new_one(ledger: Engine) -> None:
    submit(ledger, "test.insert")
    with engine().begin() as holder, ThreadPoolExecutor(1) as threads:
        holder.execute(sql("LOCK TABLE ledger.ingest_task IN SHARE MODE"))
        waits = threads.submit(submit, ledger, "test.insert")
        while (pid := scalar(BACKENDS)) is None:
            pass
        wait_until_blocked(pid)
        holder.execute(sql("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        error = waits.exception(20)
    assert isinstance(error, DBAPIError)
    assert error.connection_invalidated
    assert submit(ledger, "test.insert").created
    assert len(rows()) == 2


def test_a_ledger_that_is_not_there_is_said_in_a_sentence() -> None:
    nowhere = make_engine("postgresql+psycopg2://nobody@127.0.0.1:1/nothing")
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1 cannot be reached"):
        submit(nowhere, "test.insert")
