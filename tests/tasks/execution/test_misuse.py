"""A handler may do anything with its transaction but end it, and whatever it tries costs nobody but itself (P3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from models.engine import engine
from tasks.core.task import Task
from tasks.execution.transaction import TransactionMisused
from tests.servers import ServersOfTests
from tests.tasks.deliveries import are_well, delivered, inserting, leases, scalar, scripted, submitted
from tests.tasks.work import insert, rows, task

Misuse = Callable[[Task, Any], Any]
BAD: Final = 2  # its place in a batch of five
pytestmark = pytest.mark.usefixtures("ledger")


class _Base(DeclarativeBase):
    pass


class Positive(_Base):
    """A row that the database refuses if it is not."""

    __tablename__ = "test_positive"
    n: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def positive(ledger: ServersOfTests) -> Iterator[None]:
    with engine().begin() as connection:
        connection.execute(text("CREATE TABLE public.test_positive (n integer CHECK (n > 0))"))
    yield
    with engine().begin() as connection:
        connection.execute(text("DROP TABLE public.test_positive"))


def swallowed_in_sql(_task: Task, db: Session) -> None:
    with pytest.raises(DBAPIError):
        db.execute(text("SELECT 1 / 0"))


def swallowed_in_the_orm(_task: Task, db: Session) -> None:
    db.add(Positive(n=-1))
    with pytest.raises(IntegrityError):
        db.flush()


@pytest.mark.usefixtures("positive")
@pytest.mark.parametrize("swallow", [swallowed_in_sql, swallowed_in_the_orm])
def test_one_that_goes_on_after_an_error_of_the_database_is_charged_and_not_whoever_comes_next(swallow: Misuse) -> None:
    ids = inserting({BAD: swallow}, 5)
    delivered(ids)
    assert [count for _, count in rows()] == [0, 0, 1, 0, 0]
    are_well(ids, BAD)


@pytest.mark.usefixtures("positive")
@pytest.mark.parametrize("swallow", [swallowed_in_sql, swallowed_in_the_orm])
def test_an_error_that_stayed_in_a_savepoint_is_the_handlers_own_affair(swallow: Misuse) -> None:
    def in_a_savepoint(each: Task, db: Session) -> None:
        savepoint = db.begin_nested()
        swallow(each, db)
        savepoint.rollback()

    ids = inserting({BAD: in_a_savepoint}, 5)
    delivered(ids)
    are_well(ids)


def test_savepoints_are_the_handlers_own() -> None:
    def nested(each: Task, db: Session) -> None:
        with db.begin_nested():
            insert(each, db)
        savepoint = db.begin_nested()
        insert(each, db)
        savepoint.rollback()

    ids = scripted(nested, 5)
    delivered(ids)
    are_well(ids)


def swallowing(misuse: Misuse) -> Misuse:
    def script(each: Task, db: Any) -> None:
        with pytest.raises(TransactionMisused):
            misuse(each, db)

    return script


REFUSED: dict[str, Misuse] = {
    "commit": lambda _, db: db.commit(),
    "rollback": lambda _, db: db.rollback(),
    "close": lambda _, db: db.close(),
    "reset": lambda _, db: db.reset(),
    "invalidate": lambda _, db: db.invalidate(),
    "with db": lambda _, db: db.__enter__(),
    "with db.begin()": lambda _, db: db.begin().__enter__(),
}


@pytest.mark.parametrize("misuse", REFUSED.values(), ids=REFUSED)
def test_a_handler_that_tries_to_end_the_transaction_is_refused_and_fails(misuse: Misuse) -> None:
    ids = inserting({BAD: misuse}, 5)
    delivered(ids)
    found = task(ids[BAD])
    assert (found["status"], found["attempt_count"]) == ("RETRYING", 1)
    assert found["error_code"] == ("handler_error" if "begin" in found["last_error"] else "transaction_misused")
    are_well(ids, BAD)


def test_a_refusal_that_the_handler_swallows_has_changed_nothing() -> None:
    ids = inserting({BAD: swallowing(REFUSED["commit"]), 3: swallowing(REFUSED["rollback"])}, 5)
    delivered(ids)
    are_well(ids)


def by_sql(*said: str) -> Misuse:
    def script(each: Task, db: Session) -> None:
        for statement in said:
            db.execute(text(statement))
        insert(each, db)

    return script


BY_OTHER_WAYS: dict[str, Misuse] = {
    "COMMIT": by_sql("COMMIT"),
    "COMMIT, swallowed": lambda each, db: _quietly(by_sql("COMMIT"), each, db),
    "COMMIT AND CHAIN": by_sql("COMMIT AND CHAIN"),
    "END": by_sql("END"),
    "COMMIT; BEGIN": by_sql("COMMIT; BEGIN"),
    "PREPARE": by_sql("PREPARE TRANSACTION 'mine'"),
    "connection.commit": lambda _, db: db.connection().commit(),
    "transaction.commit": lambda _, db: db.get_transaction().commit(),
    "driver.commit": lambda _, db: db.connection().connection.commit(),
    "connection.rollback": lambda _, db: db.connection().rollback(),
    "transaction.rollback": lambda _, db: db.get_transaction().rollback(),
    "driver.rollback": lambda _, db: db.connection().connection.rollback(),
    "connection.close": lambda _, db: db.connection().close(),
}
AND_WRITES_ON: dict[str, Misuse] = {
    "ROLLBACK": by_sql("ROLLBACK"),
    "ROLLBACK AND CHAIN": by_sql("ROLLBACK AND CHAIN"),
    "ROLLBACK; BEGIN": by_sql("ROLLBACK; BEGIN"),
    "transaction.rollback, and on": lambda each, db: _and_on(each, db, db.get_transaction().rollback()),
}


def _and_on(each: Task, db: Session, _done: None) -> None:
    insert(each, db)


def _quietly(misuse: Misuse, each: Task, db: Session) -> None:
    with pytest.raises(DBAPIError):
        misuse(each, db)


@pytest.mark.parametrize("misuse", BY_OTHER_WAYS.values(), ids=BY_OTHER_WAYS)
def test_whatever_way_a_handler_finds_to_end_the_transaction_its_neighbours_effects_are_there_once(
    misuse: Misuse,
) -> None:
    """A COMMIT in the middle would leave effects without SUCCEEDED, and they would be made again."""
    ids = inserting({BAD: misuse}, 5)
    delivered(ids)
    assert task(ids[BAD])["status"] in ("DEAD", "RETRYING")
    are_well(ids, BAD)


@pytest.mark.parametrize("misuse", AND_WRITES_ON.values(), ids=AND_WRITES_ON)
def test_a_handler_that_rolls_back_and_writes_on_is_dead_and_never_run_again(misuse: Misuse) -> None:
    """What it wrote afterwards may be there, and nobody can tell."""
    ids = inserting({BAD: misuse}, 5)
    delivered(ids)
    found = task(ids[BAD])
    assert (found["status"], found["attempt_count"], found["error_code"]) == ("DEAD", 1, "transaction_misused")
    with engine().begin() as connection:
        connection.execute(text("DELETE FROM public.test_sink WHERE task_id = :id"), {"id": ids[BAD]})
    are_well(ids, BAD)


@pytest.mark.parametrize("said", ["COMMIT", "ROLLBACK"])
def test_one_that_ends_the_transaction_when_alone_is_dead(said: str) -> None:
    (id_,) = inserting({0: by_sql(said)}, 1)
    delivered([id_])
    assert rows("status, error_code") == [("DEAD", "transaction_misused")]
    assert leases() == 0


def test_nothing_of_a_misused_transaction_stays_in_the_pooled_connection() -> None:
    for said in ("COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ROLLBACK; BEGIN"):
        delivered(inserting({1: by_sql(said)}, 3))
    good = submitted(3)
    delivered(good)
    assert {task(id_)["status"] for id_ in good} == {"SUCCEEDED"}
    assert scalar("SELECT count(*) FROM pg_cursors WHERE is_holdable") == 0
