"""A handler must not end its transaction, and however it tries, it harms only its own task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from models.engine import engine
from models.guarded_session import TransactionMisused
from tasks.core.task import Task
from tests.servers import ServersOfTests
from tests.tasks.deliveries import are_well, delivered, inserting, leases, scalar, scripted, submitted
from tests.tasks.work import insert, rows, task

Misuse = Callable[[Task, Any], Any]
BAD: Final = 2  # the position of the misbehaving task in a batch of five
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


class _Base(DeclarativeBase):
    pass


class Positive(_Base):
    """A row that the database refuses unless `n` is positive."""

    __tablename__ = "test_positive"
    __table_args__ = {"schema": "public"}  # noqa: RUF012 - as SQLAlchemy declares it
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
def test_a_task_that_ignores_a_database_error_is_charged_and_not_the_next_one(swallow: Misuse) -> None:
    ids = inserting({BAD: swallow}, 5)
    delivered(ids)
    assert [count for _, count in rows()] == [0, 0, 1, 0, 0]
    are_well(ids, BAD)


@pytest.mark.usefixtures("positive")
@pytest.mark.parametrize("swallow", [swallowed_in_sql, swallowed_in_the_orm])
def test_a_database_error_inside_a_savepoint_may_be_ignored(swallow: Misuse) -> None:
    def in_a_savepoint(each: Task, db: Session) -> None:
        savepoint = db.begin_nested()
        swallow(each, db)
        savepoint.rollback()

    ids = inserting({BAD: in_a_savepoint}, 5)
    delivered(ids)
    are_well(ids)


def test_a_handler_may_use_savepoints() -> None:
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
BEGIN = REFUSED["with db.begin()"]


@pytest.mark.parametrize("misuse", REFUSED.values(), ids=REFUSED)
def test_a_handler_that_tries_to_end_the_transaction_is_refused_and_dead_at_once(misuse: Misuse) -> None:
    """It would do the same again. SQLAlchemy itself refuses `begin`, which is an error like any other."""
    ids = inserting({BAD: misuse}, 5)
    delivered(ids)
    found = task(ids[BAD])
    status, code = ("RETRYING", "handler_error") if misuse is BEGIN else ("DEAD", "transaction_misused")
    assert (found["status"], found["attempt_count"], found["error_code"]) == (status, 1, code)
    assert found["error_message"].startswith("The handler ended the transaction") == (misuse is not BEGIN)
    are_well(ids, BAD)


def test_a_refused_commit_that_the_handler_ignores_has_no_effect() -> None:
    ids = inserting({BAD: swallowing(REFUSED["commit"]), 3: swallowing(REFUSED["rollback"])}, 5)
    delivered(ids)
    are_well(ids)


def by_sql(*statements: str) -> Misuse:
    def script(each: Task, db: Session) -> None:
        for statement in statements:
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
WRITES_AFTER_ROLLBACK: dict[str, Misuse] = {
    "ROLLBACK": by_sql("ROLLBACK"),
    "ROLLBACK AND CHAIN": by_sql("ROLLBACK AND CHAIN"),
    "ROLLBACK; BEGIN": by_sql("ROLLBACK; BEGIN"),
    "transaction.rollback": lambda each, db: _write_after(each, db, db.get_transaction().rollback()),
}


def _write_after(each: Task, db: Session, _done: None) -> None:
    insert(each, db)


def _quietly(misuse: Misuse, each: Task, db: Session) -> None:
    with pytest.raises(DBAPIError):
        misuse(each, db)


@pytest.mark.parametrize("misuse", BY_OTHER_WAYS.values(), ids=BY_OTHER_WAYS)
def test_the_other_effects_of_a_batch_happen_once_however_a_handler_ends_the_transaction(misuse: Misuse) -> None:
    """A COMMIT in the middle would leave effects without SUCCEEDED, and they would happen again."""
    ids = inserting({BAD: misuse}, 5)
    delivered(ids)
    found = task(ids[BAD])
    assert (found["status"], found["attempt_count"], found["error_code"]) == ("DEAD", 1, "transaction_misused")
    assert found["error_message"] == str(TransactionMisused())
    are_well(ids, BAD)


@pytest.mark.parametrize("misuse", WRITES_AFTER_ROLLBACK.values(), ids=WRITES_AFTER_ROLLBACK)
def test_a_task_that_writes_after_its_own_rollback_is_dead_and_never_runs_again(misuse: Misuse) -> None:
    """Its later writes may be committed, which cannot be found out."""
    ids = inserting({BAD: misuse}, 5)
    delivered(ids)
    found = task(ids[BAD])
    assert (found["status"], found["attempt_count"], found["error_code"]) == ("DEAD", 1, "transaction_misused")
    with engine().begin() as connection:
        connection.execute(text("DELETE FROM public.test_sink WHERE task_id = :id"), {"id": ids[BAD]})
    are_well(ids, BAD)


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK"])
def test_a_task_that_ends_the_transaction_while_it_runs_alone_is_dead(statement: str) -> None:
    (id_,) = inserting({0: by_sql(statement)}, 1)
    delivered([id_])
    assert rows("status, error_code") == [("DEAD", "transaction_misused")]
    assert leases() == 0


def test_a_misused_transaction_leaves_the_pooled_connection_clean() -> None:
    for statement in ("COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ROLLBACK; BEGIN"):
        delivered(inserting({1: by_sql(statement)}, 3))
    good = submitted(3)
    delivered(good)
    assert {task(id_)["status"] for id_ in good} == {"SUCCEEDED"}
    assert scalar("SELECT count(*) FROM pg_cursors WHERE is_holdable") == 0
