"""A failed attempt is logged once, with its exception, and the exception is forgotten afterwards."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from models.errors import LeaseLost
from tasks.core.logs import JSON, OUTCOMES, TEXT
from tasks.core.task import Task
from tests.tasks.deliveries import delivered, handled, inserting, raising, scripted, submitted, take_away
from tests.tasks.work import OnPurpose

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


@pytest.fixture
def quiet() -> Iterator[None]:
    """Drop the records after they were made, because pytest would keep them."""

    def drop(_record: logging.LogRecord) -> bool:
        return False

    logger = logging.getLogger(OUTCOMES)
    logger.addFilter(drop)
    yield
    logger.removeFilter(drop)


def failures(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == OUTCOMES and record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("max_attempts", "level", "event"), [(2, "WARNING", "task_failed"), (1, "ERROR", "task_dead")])
def test_an_attempt_is_logged_with_the_exception_of_the_handler(
    caplog: pytest.LogCaptureFixture, max_attempts: int, level: str, event: str
) -> None:
    (id_,) = scripted(raising(OnPurpose("the card number 4711")), max_attempts=max_attempts)
    delivered([id_])
    (record,) = failures(caplog)
    logged: Any = record
    assert (record.levelname, logged.event, logged.taskId, logged.type) == (level, event, str(id_), "test.scripted")
    assert record.exc_info is not None
    kind, error, traceback = record.exc_info
    assert (kind, str(error)) == (OnPurpose, "the card number 4711")
    assert traceback is not None


def test_our_log_lines_do_not_show_the_text_of_the_exception(caplog: pytest.LogCaptureFixture) -> None:
    delivered(scripted(raising(OnPurpose("the card number 4711"))))
    (record,) = failures(caplog)
    for formatter in (JSON, TEXT):
        line = formatter.format(record)
        assert "handler_error" in line
        assert "4711" not in line
        assert "Traceback" not in line
    assert record.exc_info is not None  # for log handlers that come after ours


def test_a_failure_in_a_batch_is_logged_once_with_its_own_exception(caplog: pytest.LogCaptureFixture) -> None:
    first, second = OnPurpose("first"), OnPurpose("second")
    ids = inserting({1: raising(first), 3: raising(second)}, 5)
    delivered(ids)
    found = {getattr(record, "taskId", None): record.exc_info and record.exc_info[1] for record in failures(caplog)}
    assert found == {str(ids[1]): first, str(ids[3]): second}
    assert len(failures(caplog)) == 2


def remembered(function: Any, count: int = 1, **how: Any) -> int:
    """Run tasks whose handler raises; return how many of its objects are still alive, without garbage collection."""
    alive: list[weakref.ref[Any]] = []

    def script(task: Task) -> None:
        thing = OnPurpose("a large object of the handler")
        alive.append(weakref.ref(thing))
        function(task)
        raise OnPurpose("no") from thing

    def outside(task: Task) -> None:
        script(task)

    def inside(task: Task, _db: Session) -> None:
        script(task)

    with handled("test.remembers", inside if how.get("transactional", True) else outside, **how):
        ids = submitted(count, "test.remembers")
        gc.collect()
        gc.disable()
        try:
            delivered(ids)
            return sum(ref() is not None for ref in alive)
        finally:
            gc.enable()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("transactional", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_an_exception_does_not_keep_the_objects_of_its_handler_alive(count: int, transactional: bool) -> None:
    assert remembered(lambda _task: None, count, transactional=transactional) == 0


@pytest.mark.usefixtures("quiet")
def test_nor_does_an_exception_that_is_not_logged_because_the_lease_is_lost() -> None:
    assert remembered(lambda task: take_away(task.id), transactional=False) == 0


def test_a_lost_lease_is_no_failed_attempt(caplog: pytest.LogCaptureFixture) -> None:
    def lose(task: Task) -> None:
        take_away(task.id)
        raise LeaseLost

    with handled("test.loses", lose, transactional=False):
        delivered(submitted(1, "test.loses"))
    assert failures(caplog) == []
