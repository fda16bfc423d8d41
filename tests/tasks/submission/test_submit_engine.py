"""Submitting with an engine: a transaction of its own, which is committed when the call returns."""

from __future__ import annotations

import gc
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
from models.engine import engine, is_autocommit, make_engine
from models.errors import Unreachable
from models.sql import sql
from models.status import TaskStatus
from outbox.after_commit_publisher import after_commit_publisher
from tasks import IdempotencyConflict, NewTask, submit, submit_many
from tasks.execution.time_limits import SoftTimeLimit
from tests.outbox.ledger import arrived
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import scalar, wait_until_blocked
from tests.tasks.work import rows, transitions, wakeups

pytestmark = pytest.mark.usefixtures("stack")
BACKENDS = "SELECT max(pid) FROM pg_stat_activity WHERE application_name = 'one connection' AND state = 'active'"


@pytest.fixture(params=["ours", "ours without prepared statements", "foreign"])
def one_connection(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine with one connection, so that the next statement meets whatever the last one left there."""
    url = settings.current().database_url
    if request.param == "foreign":
        made = create_engine(url, pool_size=1, max_overflow=0, connect_args={"application_name": "one connection"})
    else:
        made = make_engine(url, pool_size=1, max_overflow=0, application_name="one connection")
    if request.param == "ours without prepared statements":
        monkeypatch.setenv("LEDGER_PREPARED_STATEMENTS", "false")
        settings.current.cache_clear()
    yield made
    made.dispose()


def test_the_task_is_committed_when_the_call_returns_and_its_wakeup_is_published(
    one_connection: Engine, stack: ServersOfTests
) -> None:
    found = submit(one_connection, "test.insert", {"n": 1}, priority=7)
    assert found.created
    assert rows("status, priority") == [("QUEUED", 7)]
    assert [to for _from, to, *_ in transitions(found.task_id)] == ["QUEUED"]
    assert len(wakeups()) == 1
    assert after_commit_publisher().wait_until_idle(10)
    assert arrived(stack) == {str(found.task_id): 1}


def test_an_idempotency_key_works_as_in_a_session(one_connection: Engine) -> None:
    first = submit(one_connection, "test.insert", {"n": 1}, key="k")
    again = submit(one_connection, "test.insert", {"n": 1}, key="k")
    assert (again.task_id, again.status, again.created) == (first.task_id, TaskStatus.QUEUED, False)
    with pytest.raises(IdempotencyConflict) as refused:
        submit(one_connection, "test.insert", {"n": 2}, key="k")
    assert refused.value.task_id == first.task_id
    assert len(rows()) == len(wakeups()) == 1


def test_many_tasks_are_one_transaction(one_connection: Engine, stack: ServersOfTests) -> None:
    taken = submit(one_connection, "test.insert", "first", key="taken").task_id
    with pytest.raises(IdempotencyConflict):
        submit_many(one_connection, [NewTask("test.insert"), NewTask("test.insert", "another", key="taken")])
    assert rows("id") == [(taken,)]
    more = submit_many(one_connection, [NewTask("test.insert", n) for n in range(3)])
    assert after_commit_publisher().wait_until_idle(10)
    assert sorted(arrived(stack)) == sorted(map(str, [taken, *(each.task_id for each in more)]))


def test_the_connection_returns_to_the_pool_without_autocommit(one_connection: Engine) -> None:
    submit(one_connection, "test.insert")
    with one_connection.connect() as connection:
        driver = connection.connection.dbapi_connection
        assert driver is not None
        assert (driver.autocommit, driver.get_transaction_status()) == (False, TRANSACTION_STATUS_IDLE)
        connection.execute(sql("DELETE FROM ledger.ingest_task"))
        connection.rollback()
    assert len(rows()) == 1


def test_an_engine_in_autocommit_mode_stays_in_it() -> None:
    """Otherwise later statements of that engine would be rolled back silently."""
    made = make_engine(settings.current().database_url, isolation_level="AUTOCOMMIT", pool_size=1, max_overflow=0)
    submit(made, "test.insert")
    with made.connect() as connection:
        connection.execute(sql("DELETE FROM ledger.ingest_task"))
    made.dispose()
    assert rows() == []


def test_a_time_limit_at_any_point_of_a_submit_leaves_the_connection_and_the_publisher_usable() -> None:
    """The limit strikes wherever Python handles signals: when a function begins, and after a C function returns."""
    made = make_engine(settings.current().database_url, pool_size=1, max_overflow=-1)
    for _ in range(2):
        submit(made, "test.insert")
    place = 0
    while _is_struck(place := place + 1, lambda: submit(made, "test.insert")):
        other = threading.Thread(target=submit, args=(engine(), "test.insert"), daemon=True)
        other.start()  # through another pool: a pool of SQLAlchemy that is interrupted may stay locked
        other.join(10)
        assert not other.is_alive(), f"after an interruption at {place} the next submit hangs"
        with made.connect() as connection:
            driver: Any = connection.connection.dbapi_connection
            assert (driver.autocommit, driver.get_transaction_status()) == (False, TRANSACTION_STATUS_IDLE), place
            assert not is_autocommit(connection), place
        if made.pool.checkedout():  # type: ignore[attr-defined]
            made.dispose()  # SQLAlchemy loses a connection that is interrupted at checkout or checkin
        assert submit(made, "test.insert").created, place
    assert place > 100
    made.dispose()


def _is_struck(place: int, function: Callable[[], object]) -> bool:
    """Call the function and interrupt it at that point, counted from 1. Return False if it ended before.

    The garbage collector is off: Python only prints what is raised in a callback of a weak reference.
    """
    passed = 0

    def strike(_frame: object, event: str, _argument: object) -> None:
        nonlocal passed
        passed += event in ("call", "c_return")
        if passed == place:
            sys.setprofile(None)
            raise SoftTimeLimit(1)

    gc.disable()
    try:
        sys.setprofile(strike)
        function()
    except SoftTimeLimit:
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return passed >= place


def test_an_error_of_the_database_leaves_the_connection_usable(one_connection: Engine) -> None:
    with engine().begin() as connection:
        connection.execute(sql("ALTER TABLE ledger.ingest_task ADD CONSTRAINT no_sevens CHECK (priority <> 7)"))
    try:
        for _ in range(2):
            with pytest.raises(IntegrityError, match="no_sevens") as refused:
                submit(one_connection, "test.insert", {"secret": 1}, priority=7)
            assert not refused.value.connection_invalidated
            assert submit(one_connection, "test.insert").created
    finally:
        with engine().begin() as connection:
            connection.execute(sql("ALTER TABLE ledger.ingest_task DROP CONSTRAINT no_sevens"))
    assert len(rows()) == len(wakeups()) == 2


def test_a_broken_connection_is_reported_and_replaced(one_connection: Engine) -> None:
    submit(one_connection, "test.insert")
    with ThreadPoolExecutor(1) as threads, engine().begin() as holder:  # if a check fails, this frees the thread first
        holder.execute(sql("LOCK TABLE ledger.ingest_task IN SHARE MODE"))
        waits = threads.submit(submit, one_connection, "test.insert")
        wait_until(lambda: scalar(BACKENDS) is not None, "the submit has begun")
        pid = scalar(BACKENDS)
        wait_until_blocked(pid)
        holder.execute(sql("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        error = waits.exception(20)
    assert isinstance(error, DBAPIError)
    assert error.connection_invalidated
    assert submit(one_connection, "test.insert").created
    assert len(rows()) == 2


def test_an_unreachable_ledger_is_reported_as_unreachable() -> None:
    nowhere = make_engine("postgresql+psycopg2://me@127.0.0.1:1/nothing")
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1 is unreachable"):
        submit(nowhere, "test.insert")
