"""A batch shares one transaction: a failing task harms no other task, and no effect happens twice."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from models.engine import engine
from models.ledger_outage import REPETITIONS
from models.sql import sql
from tally.subjects import Subject
from tasks import Discard, Permanent, Snooze
from tasks.core.task import Task
from tests.outbox.table import pid
from tests.servers import ServersOfTests
from tests.tasks.deliveries import (
    are_well,
    audits,
    change,
    counted,
    delivered,
    handled,
    inserting,
    leases,
    raising,
    scalar,
    scripted,
    submitted,
    take_away,
    wait_until_blocked,
)
from tests.tasks.work import INTO_SINK, OnPurpose, effects, rows, task, transitions

Script = Callable[[Task, Any], Any]
BAD: Final = 2  # the position of the failing task in a batch of five
TOUCH: Final = sql("UPDATE ledger.ingest_task SET context = '{}' WHERE id = :id")
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


@pytest.fixture
def checked_at_commit(ledger: ServersOfTests) -> Iterator[None]:
    """Create a table whose constraint is checked at COMMIT."""
    with engine().begin() as connection:
        connection.execute(sql("CREATE TABLE public.test_late (n integer UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
        connection.execute(sql("INSERT INTO public.test_late VALUES (1)"))
    yield
    with engine().begin() as connection:
        connection.execute(sql("DROP TABLE public.test_late"))


@pytest.mark.parametrize("bad", [0, 2, 4])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OnPurpose("no"), ("RETRYING", 1, "handler_error")),
        (Snooze(60), ("RETRYING", 0, None)),
        (Discard("not needed"), ("DISCARDED", 0, None)),
        (Permanent("never"), ("DEAD", 1, "permanent")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_task_that_does_not_succeed_has_no_effect_and_harms_no_other_task_of_its_batch(
    error: Exception, expected: tuple[Any, ...], bad: int
) -> None:
    ids = inserting({bad: raising(error)}, 5)
    before = counted()
    delivered(ids)
    found = task(ids[bad])
    assert (found["status"], found["attempt_count"], found["error_code"]) == expected
    assert len(transitions(ids[bad])) == 3
    are_well(ids, bad)
    assert (counted() - before)["succeeded"] == 4
    assert sum((counted() - before).values()) == 5


def test_a_returned_verdict_means_the_same_as_a_raised_one() -> None:
    ids = inserting({1: lambda *_: Snooze(60), 2: lambda *_: Discard("old"), 3: lambda *_: Permanent("never")}, 5)
    delivered(ids)
    assert rows("status, attempt_count") == [
        ("SUCCEEDED", 0), ("RETRYING", 0), ("DISCARDED", 0), ("DEAD", 1), ("SUCCEEDED", 0),
    ]  # fmt: skip
    are_well(ids, 1, 2, 3)


def test_several_failing_tasks_of_a_batch_are_charged_once_each() -> None:
    ids = inserting(dict.fromkeys([0, 3, 4], raising(OnPurpose())), 5)
    delivered(ids)
    assert [count for _, count in rows()] == [1, 0, 0, 1, 1]
    are_well(ids, 0, 3, 4)


def test_all_effects_of_a_successful_batch_are_in_one_commit() -> None:
    ids = inserting({}, 50)
    delivered(ids)
    assert scalar("SELECT count(DISTINCT xmin::text) FROM public.test_sink") == 1
    assert scalar("SELECT count(DISTINCT xmin::text) FROM ledger.ingest_task") == 1
    same = "SELECT count(*) FROM ledger.ingest_task t JOIN public.test_sink s ON task_id = id WHERE t.xmin = s.xmin"
    assert scalar(same) == 50


def test_a_task_that_another_worker_took_in_the_middle_has_no_effect_here() -> None:
    """The batch is rolled back, and the other tasks run again."""
    taken: dict[uuid.UUID, uuid.UUID] = {}

    def lose(each: Task, _db: Session) -> None:
        if each.id not in taken:
            taken[each.id] = take_away(each.id)

    ids = inserting({BAD: lose}, 5)
    before, lost_before = counted(), counted(Subject.LEASE)
    delivered(ids)
    found = task(ids[BAD])
    assert (found["status"], found["lease_token"]) == ("RUNNING", taken[ids[BAD]])
    assert audits() == [(ids[BAD], "late_success")]
    assert counted() - before == {"succeeded": 4, "lease_lost": 1}
    assert counted(Subject.LEASE) - lost_before == {"lost": 1}
    are_well(ids, BAD)


def test_a_batch_whose_whole_lease_was_lost_writes_only_audits() -> None:
    def lose(each: Task, _db: Session) -> None:
        if each.payload["n"] == 2:
            with engine().begin() as connection:
                connection.execute(sql("UPDATE ledger.ingest_task SET lease_token = NULL, status = 'QUEUED'"))
                connection.execute(sql("DELETE FROM ledger.task_lease"))

    ids = inserting(dict.fromkeys(range(3), lose), 3)
    delivered(ids)
    assert rows() == [("QUEUED", 0)] * 3
    assert sorted(audits()) == sorted((id_, "late_success") for id_ in ids)
    assert effects() == {}


def test_a_failure_under_a_lost_lease_is_audited_and_not_written() -> None:
    def lose(each: Task, _db: Session) -> None:
        take_away(each.id)
        raise OnPurpose

    ids = inserting({0: lose}, 1)
    delivered(ids)
    assert rows() == [("RUNNING", 0)]
    assert audits() == [(ids[0], "lease_lost")]
    assert leases() == 0


class _Base(DeclarativeBase):
    pass


class Sunk(_Base):
    """A row of the table of effects."""

    __tablename__ = "test_sink"
    __table_args__ = {"schema": "public"}  # noqa: RUF012 - as SQLAlchemy declares it
    task_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    note: Mapped[str]


def test_a_flush_that_fails_after_the_handler_has_returned_fails_its_task() -> None:

    def broken(each: Task, db: Session) -> None:
        db.add(Sunk(task_id=each.id, note="a NUL: \x00"))

    ids = inserting({BAD: broken}, 5)
    delivered(ids)
    assert task(ids[BAD])["attempt_count"] == 1
    are_well(ids, BAD)


def test_orm_objects_are_committed_without_a_flush_by_the_handler() -> None:
    ids = scripted(lambda each, db: db.add(Sunk(task_id=each.id, note="")), 5)
    delivered(ids)
    are_well(ids)


@pytest.mark.usefixtures("checked_at_commit")
def test_a_violated_deferred_constraint_fails_only_the_task_that_violated_it() -> None:
    ids = inserting({BAD: lambda _, db: db.execute(sql("INSERT INTO public.test_late VALUES (1)"))}, 5)
    delivered(ids)
    found = task(ids[BAD])
    assert (found["status"], found["attempt_count"]) == ("RETRYING", 1)
    assert "IntegrityError" in found["error_message"]
    are_well(ids, BAD)


def failing(code: str, times: int) -> Script:
    """Return a script that raises this database error so many times."""
    left = [times]

    def script(_task: Task, db: Session) -> None:
        if left[0]:
            left[0] -= 1
            db.execute(sql(f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}'; END $$"))

    return script


@pytest.mark.parametrize("code", ["40001", "40P01"])
@pytest.mark.parametrize("count", [1, 5])
def test_a_serialization_failure_is_repeated_and_not_charged(code: str, count: int) -> None:
    ids = inserting({0: failing(code, REPETITIONS)}, count)
    delivered(ids)
    are_well(ids)


def test_a_serialization_failure_of_the_drivers_cursor_is_repeated_and_not_charged() -> None:
    runs: list[int] = []

    def fail_once(each: Task, db: Any) -> None:
        runs.append(each.payload["n"])
        with db.cursor() as cursor:
            cursor.execute("INSERT INTO public.test_sink (task_id, note) VALUES (%s, '')", (str(each.id),))
            if each.payload["n"] == 1 and runs.count(1) == 1:
                cursor.execute("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$")

    ids = scripted(fail_once, 3)
    delivered(ids)
    assert runs == [0, 1, 0, 1, 2]
    are_well(ids)


def test_the_drivers_cursor_sees_what_the_orm_has_not_written_yet() -> None:
    seen: list[Any] = []

    def write_and_read(each: Task, db: Any) -> None:
        db.add(Sunk(task_id=each.id, note="by the ORM"))
        with db.cursor() as cursor:
            cursor.execute("SELECT note FROM public.test_sink")
            seen.extend(cursor.fetchall())

    ids = scripted(write_and_read)
    delivered(ids)
    assert seen == [("by the ORM",)]
    are_well(ids)


def test_a_serialization_failure_that_the_handler_wraps_in_another_error_is_repeated() -> None:
    fail = failing("40001", 2)

    def script(each: Task, db: Session) -> None:
        try:
            fail(each, db)
        except DBAPIError as error:
            raise RuntimeError("my own words") from error

    ids = inserting({1: script}, 3)
    delivered(ids)
    are_well(ids)


def test_a_serialization_failure_at_commit_is_repeated_and_not_charged() -> None:
    with engine().begin() as connection:
        connection.execute(
            sql("""
            CREATE TABLE public.test_conflict (n integer);
            CREATE FUNCTION public.test_ask() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF nextval('public.test_times') < 4 THEN RAISE EXCEPTION USING ERRCODE = '40001'; END IF;
                RETURN NULL; END $$;
            CREATE SEQUENCE public.test_times;
            CREATE CONSTRAINT TRIGGER ask AFTER INSERT ON public.test_conflict DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION public.test_ask()""")
        )
    try:
        ids = inserting({1: lambda _, db: db.execute(sql("INSERT INTO public.test_conflict VALUES (1)"))}, 3)
        delivered(ids)
        are_well(ids)
    finally:
        with engine().begin() as connection:
            connection.execute(
                sql("DROP TABLE public.test_conflict; DROP FUNCTION public.test_ask; DROP SEQUENCE public.test_times")
            )


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_a_serialization_failure_of_the_claim_is_repeated_and_not_charged(code: str) -> None:
    """It happens if the database's default is REPEATABLE READ or SERIALIZABLE."""
    with engine().begin() as connection:
        connection.execute(
            sql(f"""
            CREATE SEQUENCE public.test_times;
            CREATE FUNCTION public.test_ask() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF nextval('public.test_times') <= {REPETITIONS} THEN RAISE EXCEPTION USING ERRCODE = '{code}'; END IF;
                RETURN NULL; END $$;
            CREATE TRIGGER ask AFTER INSERT ON ledger.task_lease FOR EACH ROW EXECUTE FUNCTION public.test_ask()""")
        )
    try:
        ids = inserting({}, 3)
        delivered(ids)
        are_well(ids)
    finally:
        with engine().begin() as connection:
            connection.execute(sql("DROP FUNCTION public.test_ask CASCADE; DROP SEQUENCE public.test_times"))


def test_endless_serialization_failures_are_not_charged_and_the_task_waits_a_second() -> None:
    ids = inserting({1: failing("40001", 1000)}, 3)
    delivered(ids)
    found = task(ids[1])
    assert (found["status"], found["attempt_count"]) == ("RETRYING", 0)
    assert (found["next_retry_at"] - found["updated_at"]).total_seconds() == 1
    assert "repetition" in transitions(ids[1], "message")[-1][0]
    are_well(ids, 1)


def test_a_real_deadlock_is_not_charged(ledger: ServersOfTests) -> None:
    """Two connections lock two rows in opposite order, and the server cancels ours."""
    first, second = later = submitted(2)
    for id_ in later:
        change(id_, "next_retry_at = ledger.ledger_now() + interval '1 hour'")
    other = ledger.cluster.superuser.connect()
    other.execute(sql("SET LOCAL deadlock_timeout = '1min'"))  # so that the server cancels ours
    other.execute(TOUCH, {"id": second})
    waiting: list[threading.Thread] = []

    def cross(_task: Task, db: Session) -> None:
        if not waiting:
            db.execute(TOUCH, {"id": first})
            waiting.append(threading.Thread(target=other.execute, args=(TOUCH, {"id": first})))
            waiting[0].start()
            wait_until_blocked(pid(other))
            db.execute(TOUCH, {"id": second})

    ids = inserting({1: cross}, 3)
    delivered(ids)
    waiting[0].join()
    other.close()
    are_well(ids)


def test_a_batch_handler_that_fails_gets_the_tasks_one_by_one() -> None:
    sizes: list[int] = []

    def many(tasks: list[Task], db: Session) -> None:
        sizes.append(len(tasks))
        db.execute(INTO_SINK, [{"task_id": each.id, "note": ""} for each in tasks])
        if any(each.payload == BAD for each in tasks):
            raise OnPurpose

    with handled("test.bulk", many, many=True):
        ids = submitted(5, "test.bulk", lambda n: n)
        delivered(ids)
    assert sizes == [5, 1, 1, 1, 1, 1]
    assert task(ids[BAD])["attempt_count"] == 1
    are_well(ids, BAD)


def test_a_batch_handler_may_return_a_result_for_each_task_and_a_bad_one_fails_only_its_task() -> None:
    def many(tasks: list[Task], db: Session) -> list[Any]:
        db.execute(INTO_SINK, [{"task_id": each.id, "note": ""} for each in tasks])
        return [{"n": each.payload} if each.payload != BAD else float("nan") for each in tasks]

    with handled("test.bulk", many, many=True):
        ids = submitted(5, "test.bulk", lambda n: n)
        delivered(ids)
    assert rows("result, error_code", f"id <> '{ids[BAD]}'") == [({"n": n}, None) for n in (0, 1, 3, 4)]
    assert task(ids[BAD])["error_code"] == "bad_result"
    are_well(ids, BAD)


@pytest.mark.parametrize("result", [[1], {"a": 1}, "abcde", 5], ids=repr)
def test_a_batch_handler_that_returns_neither_nothing_nor_a_result_for_each_task_fails(result: Any) -> None:
    with handled("test.bulk", lambda _tasks, _db: result, many=True):
        delivered(submitted(5, "test.bulk"))
    assert {count for _, count in rows()} == ({0} if result == [1] else {1})
