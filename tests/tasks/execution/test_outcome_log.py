"""A failed attempt is logged once, with its exception, and the exception is forgotten afterwards."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport
from sqlalchemy.orm import Session

from models.errors import LeaseLost
from tasks.core.logs import JSON, OUTCOMES, TEXT
from tasks.core.task import Task
from tests.tasks.deliveries import change, delivered, handled, inserting, raising, scripted, submitted, take_away
from tests.tasks.work import OnPurpose, task

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


def test_an_attempt_of_an_async_handler_is_logged_with_its_exception(caplog: pytest.LogCaptureFixture) -> None:
    error = OnPurpose("no")

    async def do(_task: Task) -> None:
        raise error

    with handled("test.async", do):
        (id_,) = submitted(1, "test.async", max_attempts=1)
        delivered([id_])
    (record,) = failures(caplog)
    logged: Any = record
    assert (record.levelname, logged.event, logged.taskId, logged.type) == (
        "ERROR",
        "task_dead",
        str(id_),
        "test.async",
    )
    assert record.exc_info is not None
    assert record.exc_info[1] is error


class Unprintable(Exception):
    """An exception that can be neither printed nor pickled."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__

    def __reduce__(self) -> Any:
        raise RuntimeError("not to be pickled")


class KeptEvents(Transport):
    """Keeps Sentry's events, in the place of a server."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.events: list[Any] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        self.events.append(envelope.get_event())


@contextmanager
def sentry(**how: Any) -> Iterator[list[Any]]:
    """Connect Sentry in this process, and yield its events."""
    kept = KeptEvents()
    client = sentry_sdk.Client(dsn="http://key@localhost/1", transport=kept, default_integrations=False, **how)
    with sentry_sdk.new_scope() as scope:
        scope.set_client(client)
        yield kept.events
    client.close(timeout=0)


def test_sentry_gets_every_attempt_if_its_logging_integration_takes_warnings() -> None:
    with sentry(integrations=[LoggingIntegration(event_level=logging.WARNING)]) as events:
        (id_,) = scripted(raising(OnPurpose("no")), max_attempts=3)
        for _ in range(3):
            change(id_, "next_retry_at = NULL, status = 'QUEUED'")
            delivered([id_])
    assert [(event["level"], event["extra"]["attempt"]) for event in events] == [
        ("warning", 1),
        ("warning", 2),
        ("error", 3),
    ]
    assert {(event["extra"]["taskId"], event["extra"]["type"]) for event in events} == {(str(id_), "test.scripted")}
    assert {event["exception"]["values"][-1]["type"] for event in events} == {"OnPurpose"}


def test_an_exception_that_can_be_neither_printed_nor_pickled_is_a_failure_like_any_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with sentry(integrations=[LoggingIntegration()]) as events:
        (id_,) = scripted(raising(Unprintable(lambda: None)), max_attempts=1)
        delivered([id_])
    assert task(id_)["status"] == "DEAD"
    assert task(id_)["error_message"] == "Unprintable: its text cannot be shown (RuntimeError)"
    assert [event["exception"]["values"][-1]["type"] for event in events] == ["Unprintable"]
    (record,) = failures(caplog)
    for formatter in (JSON, TEXT, logging.Formatter()):
        assert "handler_error" in formatter.format(record)


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
