"""Jobs that a process repeats: what fails is logged when it begins, and an outage of the ledger once for all jobs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from models.errors import Unreachable
from models.ledger_outage import outage
from tasks.core.repeated_jobs import RepeatedJobs


@pytest.fixture(autouse=True)
def answered() -> Iterator[None]:
    """Begin and end without an outage, because its state belongs to the process."""
    outage.note_answer()
    yield
    outage.note_answer()


def failing(error: Exception) -> Callable[[], None]:
    def job() -> None:
        raise error

    return job


def was_not_due() -> bool:
    return False


def succeeds() -> None:
    pass


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "event", "") for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_job_that_fails_again_and_again_is_logged_once_although_it_is_not_always_due(
    caplog: pytest.LogCaptureFixture,
) -> None:
    jobs = RepeatedJobs("The API")
    for job in (failing(ValueError("no\nway")), was_not_due, failing(ValueError("no")), was_not_due):
        jobs.run("count", job)
    assert events(caplog) == ["repeated_job_failed"]
    assert caplog.messages == ["The API cannot count: no"]
    jobs.run("count", succeeds)
    jobs.run("count", failing(ValueError("no")))
    assert len(events(caplog)) == 2


def test_an_outage_of_the_ledger_is_one_event_however_many_jobs_meet_it_and_one_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    jobs = RepeatedJobs("The API")
    for _ in range(3):
        jobs.run("count", failing(Unreachable("PostgreSQL is unreachable")))
        jobs.run("register", failing(Unreachable("PostgreSQL is unreachable")))
        jobs.run("register", was_not_due)
        jobs.run("look at its children", succeeds)  # it does not need the ledger
    assert events(caplog) == ["ledger_down"]
    jobs.run("register", succeeds)
    jobs.run("count", succeeds)
    assert events(caplog) == ["ledger_down", "ledger_up"]
    jobs.run("count", failing(Unreachable("PostgreSQL is unreachable")))
    assert events(caplog)[2:] == ["ledger_down"]
