"""A function that is given to a PostgreSQL sink may use the ORM, SQL text and savepoints together."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sinks.configuration import open_sinks
from tasks.core.task import Task
from tests.sinks.places import INSERT, KeyedPlace, OtherPostgres, TwoPhasePlace, insert
from tests.tasks.outside import ran, state


class Base(DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "effect"
    __table_args__ = {"schema": "public"}  # noqa: RUF012

    task_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    n: Mapped[int] = mapped_column(primary_key=True)


def write(db: Session, task_id: uuid.UUID) -> None:
    insert(db, task_id, 1)
    db.add(Effect(task_id=task_id, n=2))
    db.flush()
    with pytest.raises(DBAPIError), db.begin_nested():  # the savepoint takes back both rows
        db.execute(INSERT, [{"task_id": task_id, "n": 3}, {"task_id": None, "n": 4}])
    insert(db, task_id, 5)
    db.add(Effect(task_id=task_id, n=6))


@pytest.mark.guarantee
@pytest.mark.parametrize("kind", [KeyedPlace, TwoPhasePlace])
def test_the_orm_text_and_savepoints_share_one_transaction(
    kind: type[OtherPostgres], other: Engine, configure: Callable[..., None]
) -> None:
    place = kind(other)
    configure(place=place.setting)
    open_sinks().find("place").prepare()

    def fail_once(task: Task) -> None:
        task.sink("place").run(write, task.id)
        if task.attempt_count == 0:
            raise KeyError("no")

    id_ = ran(fail_once, times=2)
    assert state(id_) == ("SUCCEEDED", 1, None)
    assert place.count(id_) == 4
    assert place.left_behind() == []


@pytest.mark.guarantee
@pytest.mark.parametrize("kind", [KeyedPlace, TwoPhasePlace])
def test_nothing_of_a_function_that_fails_after_orm_and_text_is_left(
    kind: type[OtherPostgres], other: Engine, configure: Callable[..., None]
) -> None:
    place = kind(other)
    configure(place=place.setting)
    open_sinks().find("place").prepare()

    def write_and_fail(db: Session, task_id: uuid.UUID) -> None:
        write(db, task_id)
        raise KeyError("no")

    id_ = ran(lambda task: task.sink("place").run(write_and_fail, task.id), max_attempts=1)
    assert (state(id_)[0], place.count(id_), place.left_behind()) == ("DEAD", 0, [])
