"""`submitted` and `assert_submitted` find the tasks of this transaction, and their errors list what was submitted."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.orm import Session

from models.clock import now
from models.engine import engine
from models.sql import sql
from tasks import NewTask, Task, submit, submit_many
from tasks.testing import ClockRefused, assert_submitted, run, submitted, travel
from tests.servers import ServersOfTests
from tests.tasks.deliveries import handled


def order(task: Task, db: Session) -> None:
    submit(db, "test.mail", {"to": task.payload, "lines": {"n": 1, "m": 2}}, key=f"mail {task.payload}")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    with handled("test.order", order), handled("test.mail", lambda _task, _db: None):
        yield


def test_tasks_of_a_handler_are_found_and_tasks_of_run_are_not(db: Session) -> None:
    run("test.order", "ada", db)

    assert [task.type for task in submitted(db)] == ["test.mail"]
    (mail,) = assert_submitted(db, type="test.mail", payload={"to": "ada", "lines": {"n": 1}}, key="mail ada", count=1)
    assert (mail.status, mail.run_at, mail.queue) == ("QUEUED", None, "ingest")
    assert_submitted(db, type="test.order", count=0)


def test_tasks_are_found_however_they_were_submitted_and_in_savepoints(db: Session) -> None:
    submit(db, "test.mail", 1)
    with db.begin_nested():
        submit_many(db, [NewTask("test.mail", 2), NewTask("test.mail", 3, partition_key="p")])
    with db.begin_nested() as savepoint:
        submit(db, "test.mail", "rolled back")
        savepoint.rollback()
    db.execute(sql("SELECT ledger.ingest_submit('test.mail', '4')"))
    db.commit()  # releases a savepoint of the test's transaction

    assert sorted(task.payload for task in submitted(db)) == [1, 2, 3, 4]
    assert_submitted(db, partition_key="p", count=1)


def test_visible_tasks_of_other_transactions_are_not_found(db: Session) -> None:
    for payload in range(3):
        assert [task.payload for task in submitted(db)] == list(range(payload))
        with Session(engine()) as other:
            submit(other, "test.mail", "theirs", run_at=timedelta(hours=1))
            other.commit()
        submit(db, "test.mail", payload)
    assert db.execute(sql("SELECT count(*) FROM ledger.ingest_task")).scalar() == 6
    assert [task.payload for task in submitted(db)] == [0, 1, 2]
    with engine().begin() as connection:
        for table in ("ingest_task", "ingest_task_transition", "outbox_event"):
            connection.execute(sql(f"DELETE FROM ledger.{table}"))


def test_the_error_lists_what_was_submitted_instead(db: Session) -> None:
    run("test.order", "ada", db)
    with pytest.raises(AssertionError) as raised:
        assert_submitted(db, type="test.mail", payload={"to": "bob"})
    assert str(raised.value) == (
        "Expected at least 1 task with type='test.mail', payload={'to': 'bob'}, found 0.\n"
        "Submitted in this transaction:\n"
        """  test.mail {"to": "ada", "lines": {"m": 2, "n": 1}} key='mail ada'"""
    )
    with pytest.raises(AssertionError, match=r"^Expected 0 tasks with type='test.mail', found 1\."):
        assert_submitted(db, type="test.mail", count=0)
    with pytest.raises(AssertionError, match=r"^Expected 2 tasks with type='test.mail', found 1\."):
        assert_submitted(db, type="test.mail", count=2)


def test_the_error_is_short_for_no_tasks_and_for_many(db: Session) -> None:
    with pytest.raises(AssertionError, match=r"anything, found 0\.\nNothing was submitted in this transaction\."):
        assert_submitted(db)
    submit_many(db, [NewTask("test.mail", "x" * 1000) for _ in range(25)])
    with pytest.raises(AssertionError) as raised:
        assert_submitted(db, type="test.order")
    lines = str(raised.value).splitlines()
    assert (len(lines), lines[-1]) == (23, "  and 5 more")
    assert all(len(line) < 210 for line in lines)


def test_time_moves_for_this_transaction_only(db: Session) -> None:
    before = now(db.connection())
    assert travel(db, hours=1) - before > timedelta(hours=1)
    assert travel(db, timedelta(days=-1)) < before
    with engine().connect() as other:
        assert abs(now(other) - datetime.now(UTC)) < timedelta(minutes=1)


def test_a_role_that_may_not_move_the_clock_gets_an_error_and_keeps_its_transaction(stack: ServersOfTests) -> None:
    with Session(engine()) as session:
        submit(session, "test.mail", 1)
        with pytest.raises(ClockRefused, match=r"The role 'celeriac' may not .* only a superuser"):
            travel(session, hours=1)
        assert_submitted(session, type="test.mail", count=1)
        session.rollback()
