"""`run` uses production's claim and settling in a user's transaction, and nothing remains after its rollback."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from models.engine import engine
from models.errors import Misuse
from models.guarded_session import TransactionMisused
from tasks import Discard, Finish, Permanent, Snooze, Task, submit
from tasks.core import batch_size
from tasks.submission.submit import IdempotencyConflict
from tasks.testing import deliver, run, run_due, run_many, travel
from tests.servers import ServersOfTests
from tests.tasks.deliveries import BatchClock, handled

PAY = text("INSERT INTO public.invoice VALUES (:number, 1) ON CONFLICT (number) DO UPDATE SET paid = invoice.paid + 1")
INVOICES = text("SELECT number, paid FROM public.invoice ORDER BY number")


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoice"
    __table_args__ = {"schema": "public"}  # noqa: RUF012 - SQLAlchemy reads it from the class

    number: Mapped[int] = mapped_column(primary_key=True)
    paid: Mapped[int]


def pay(task: Task, db: Session) -> Any:
    db.execute(PAY, {"number": task.payload["invoice"]})
    match task.payload.get("then"):
        case "snooze":
            raise Snooze(60)
        case "discard":
            raise Discard("paid twice")
        case "permanent":
            raise Permanent("there is no such invoice")
        case "fail":
            raise LookupError("no answer")
        case "submit":
            submit(db, "test.pay", {"invoice": task.payload["invoice"] + 1})
    return {"invoice": task.payload["invoice"]}


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    with handled("test.pay", pay, backoff=[60, 300], max_attempts=3):
        yield


def invoices(db: Session | Connection) -> list[tuple[int, int]]:
    return [tuple(row) for row in db.execute(INVOICES)]


def test_effect_result_and_history_of_a_task_are_in_the_users_transaction(db: Session) -> None:
    ran = run("test.pay", {"invoice": 17}, db)

    assert (ran.status, ran.was_run, ran.result, ran.raised) == ("SUCCEEDED", True, {"invoice": 17}, None)
    assert [each.to_status for each in ran.transitions] == ["QUEUED", "RUNNING", "SUCCEEDED"]
    assert invoices(db) == [(17, 1)]


def test_a_failed_task_has_no_effect_and_waits_for_its_handlers_backoff(db: Session) -> None:
    ran = run("test.pay", {"invoice": 17, "then": "fail"}, db)

    assert (ran.status, ran.attempt_count, ran.retry_after) == ("RETRYING", 1, timedelta(seconds=60))
    assert (ran.error_code, ran.error_message) == ("handler_error", "LookupError: no answer")
    assert isinstance(ran.raised, LookupError)
    assert "raise LookupError" in (ran.last_error or "")
    assert invoices(db) == []


def test_a_test_can_follow_a_task_through_its_retries_until_it_is_dead(db: Session) -> None:
    first = run("test.pay", {"invoice": 17, "then": "fail"}, db)
    assert not deliver(db, first.task_id).was_run, "it is not due"

    travel(db, minutes=1)
    second = deliver(db, first.task_id)
    assert (second.status, second.attempt_count, second.retry_after) == ("RETRYING", 2, timedelta(seconds=300))

    travel(db, minutes=5)
    third = deliver(db, first.task_id)
    assert (third.status, third.attempt_count, third.next_retry_at) == ("DEAD", 3, None)
    assert len(third.transitions) == 7


@pytest.mark.parametrize(
    ("then", "status", "attempts", "verdict"),
    [("snooze", "RETRYING", 0, Snooze), ("discard", "DISCARDED", 0, Discard), ("permanent", "DEAD", 1, Permanent)],
)
def test_a_verdict_is_settled_as_in_production(
    db: Session, then: str, status: str, attempts: int, verdict: type[Exception]
) -> None:
    ran = run("test.pay", {"invoice": 17, "then": then}, db)

    assert (ran.status, ran.attempt_count, type(ran.raised)) == (status, attempts, verdict)
    assert invoices(db) == []


def test_a_failing_task_does_not_harm_the_others_of_its_batch(db: Session) -> None:
    ran = run_many("test.pay", [{"invoice": 1}, {"invoice": 2, "then": "fail"}, {"invoice": 3}], db)

    assert [each.status for each in ran] == ["SUCCEEDED", "RETRYING", "SUCCEEDED"]
    assert [each.raised is not None for each in ran] == [False, True, False]
    assert invoices(db) == [(1, 1), (3, 1)]


def test_a_batch_handler_gets_the_whole_batch_at_once(db: Session) -> None:
    seen: list[int] = []

    def pay_all(tasks: Sequence[Task], db: Session) -> list[int]:
        seen.append(len(tasks))
        db.execute(PAY, [{"number": task.payload} for task in tasks])
        return [task.payload * 10 for task in tasks]

    with handled("test.pay_all", pay_all, many=True, batch=3):
        assert [each.result for each in run_many("test.pay_all", [1, 2, 3], db)] == [10, 20, 30]
        assert run("test.pay_all", 4, db).result == 40
        with pytest.raises(Misuse, match="at most 3 tasks; 4 were given"):
            run_many("test.pay_all", [1, 2, 3, 4], db)
    assert seen == [3, 1]


def test_run_does_not_add_other_due_tasks_to_the_batch(db: Session) -> None:
    """A claim in production does."""
    submit(db, "test.pay", {"invoice": 1})
    run("test.pay", {"invoice": 2}, db)
    assert invoices(db) == [(2, 1)]


def test_steps_are_kept_over_a_retry_and_the_finish_commits_with_the_success(db: Session) -> None:
    asked: list[str] = []

    def fetch(number: int) -> int:
        asked.append("number")
        return number

    def sync(task: Task) -> Finish:
        number = task.step("number", fetch, 18)
        for item in task.resume("lines", ["a", "b"], every=1):
            asked.append(item)
            if item == "b" and task.attempt_count == 0:
                raise ConnectionError("no answer")
        return Finish(lambda db: db.execute(PAY, {"number": number}), {"number": number})

    with handled("test.sync", sync, transactional=False, backoff=[60]):
        first = run("test.sync", None, db)
        assert (first.status, first.error_message) == ("RETRYING", "ConnectionError: no answer")
        assert invoices(db) == []
        travel(db, minutes=1)
        second = deliver(db, first.task_id)

    assert (second.status, second.result) == ("SUCCEEDED", {"number": 18})
    assert asked == ["number", "a", "b", "b"]
    assert invoices(db) == [(18, 1)]


def test_run_due_runs_all_due_tasks_and_those_that_they_submit(db: Session) -> None:
    submit(db, "test.pay", {"invoice": 1, "then": "submit"})
    submit(db, "test.pay", {"invoice": 7}, run_at=timedelta(hours=1))

    assert [ran.payload["invoice"] for ran in run_due(db)] == [1, 2]
    assert run_due(db) == []
    travel(db, hours=2)
    assert [ran.payload["invoice"] for ran in run_due(db)] == [7]


def test_a_task_with_a_partition_key_waits_for_its_turn(db: Session) -> None:
    first = run("test.pay", {"invoice": 1, "then": "fail"}, db, partition_key="customer")
    second = run("test.pay", {"invoice": 2}, db, partition_key="customer")
    assert (first.status, second.status, second.was_run) == ("RETRYING", "QUEUED", False)
    assert run_due(db) == []

    travel(db, minutes=1)
    assert deliver(db, first.task_id).status == "RETRYING"
    travel(db, minutes=5)
    assert deliver(db, first.task_id).status == "DEAD", "it blocks its key"
    assert not deliver(db, second.task_id).was_run


def test_idempotency_keys_work_as_in_production(db: Session) -> None:
    first = run("test.pay", {"invoice": 1}, db, key="one")
    again = run("test.pay", {"invoice": 1}, db, key="one")
    assert (again.task_id, again.was_run, again.status) == (first.task_id, False, "SUCCEEDED")
    with pytest.raises(IdempotencyConflict):
        run("test.pay", {"invoice": 2}, db, key="one")
    assert invoices(db) == [(1, 1)], "the transaction of the test is still usable"


def test_run_without_a_transaction_leaves_no_rows(stack: ServersOfTests) -> None:
    with handled("test.add", lambda task, _db: sum(task.payload)):
        assert run("test.add", [1, 2, 3]).result == 6


def test_run_accepts_a_plain_connection_and_a_session_of_an_engine(stack: ServersOfTests) -> None:
    with handled("test.add", lambda task, _db: sum(task.payload)):
        with engine().connect() as connection:
            assert run("test.add", [1], connection).result == 1
            connection.rollback()
        with Session(engine()) as session:
            assert run("test.add", [2], session).result == 2
            session.rollback()


def test_orm_objects_of_the_test_are_flushed_before_and_refreshed_after_the_handler(db: Session) -> None:
    db.add(invoice := Invoice(number=1, paid=1))
    run("test.pay", {"invoice": 1}, db)
    assert invoice.paid == 2


def test_a_constraint_that_is_deferred_to_the_commit_fails_the_task(db: Session) -> None:
    db.execute(text("ALTER TABLE public.invoice ADD UNIQUE (paid) DEFERRABLE INITIALLY DEFERRED"))
    assert run("test.pay", {"invoice": 1}, db).status == "SUCCEEDED"
    refused = run("test.pay", {"invoice": 2}, db)
    assert (refused.status, refused.error_code) == ("RETRYING", "handler_error")
    assert "duplicate key" in (refused.error_message or "")
    db.execute(text("INSERT INTO public.invoice VALUES (9, 1)"))  # the constraint is still deferred for the test
    db.execute(text("DELETE FROM public.invoice WHERE number = 9"))
    assert invoices(db) == [(1, 1)]


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_a_handler_that_ends_its_transaction_is_refused_as_in_production(db: Session, end: str) -> None:
    with handled("test.ends", lambda _task, given: getattr(given, end)()):
        ran = run("test.ends", None, db)
    assert (ran.status, ran.error_code) == ("DEAD", "transaction_misused")
    assert run("test.pay", {"invoice": 1}, db).status == "SUCCEEDED", "the transaction of the test is still usable"


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK"])
def test_a_handler_that_ends_the_transaction_with_plain_sql_is_reported_to_the_test(
    stack: ServersOfTests, statement: str
) -> None:
    with handled("test.ends", lambda _task, given: given.execute(text(statement))), engine().connect() as connection:
        with pytest.raises(TransactionMisused, match="ended the transaction of your test"):
            run("test.ends", None, connection)
        connection.rollback()


def test_a_handler_that_commits_the_connection_commits_nothing_and_leaves_it_clean(stack: ServersOfTests) -> None:
    """SQLAlchemy believes that the transaction is over, and returns the connection to the pool as it is."""
    with (
        handled("test.ends", lambda _task, given: given.connection().commit()),
        engine().connect() as connection,
        pytest.raises(TransactionMisused, match="ended the transaction of your test"),
    ):
        run("test.ends", None, connection)
    with engine().connect() as the_same:
        assert the_same.execute(text("SELECT count(*) FROM pg_cursors WHERE name = 'celeriac_batch'")).scalar() == 0
        the_same.commit()


def test_a_connection_that_cannot_be_rolled_back_is_refused(stack: ServersOfTests) -> None:
    autocommit = engine().connect().execution_options(isolation_level="AUTOCOMMIT")
    with autocommit, pytest.raises(Misuse, match="autocommit mode"):
        run("test.pay", {"invoice": 1}, autocommit)
    with create_engine("sqlite://").connect() as connection, pytest.raises(Misuse, match="psycopg2"):
        run("test.pay", {"invoice": 1}, connection)
    with pytest.raises(Misuse, match="a Session or Connection"):
        run("test.pay", {"invoice": 1}, "db")  # type: ignore[arg-type]


def test_a_handler_that_takes_too_long_is_interrupted(db: Session) -> None:
    with handled("test.sleep", lambda _task, _db: time.sleep(20), soft_limit_seconds=0.05):
        ran = run("test.sleep", None, db)
    assert (ran.status, ran.error_code) == ("RETRYING", "timeout")


def test_the_repr_of_a_result_shows_why_the_task_failed(db: Session) -> None:
    """pytest prints it when an assertion of a user fails."""
    printed = repr(run("test.pay", {"invoice": 17, "then": "fail"}, db))
    assert "RETRYING" in printed
    assert "LookupError: no answer" in printed
    assert "Traceback" not in printed


def test_delivering_an_unknown_task_is_refused(db: Session) -> None:
    with pytest.raises(Misuse, match="There is no task"):
        deliver(db, uuid.uuid4())


@pytest.mark.parametrize("is_known", [True, False])
def test_a_slow_handler_runs_its_batch_to_the_end(is_known: bool, db: Session, clock: BatchClock) -> None:
    """In production other workers would run the rest; they cannot see the transaction of a test."""
    with handled("test.slow", lambda _task, _db: clock.passes(2 * batch_size.STOP_SECONDS)):
        if is_known:
            run("test.slow", db=db)
        assert [each.status for each in run_many("test.slow", [1, 2, 3], db)] == ["SUCCEEDED"] * 3
