"""Which errors are retried: lists of exception classes, verdicts of a handler, and the backoff."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.orm import Session

from tasks import Discard, Snooze
from tasks.core.registry import BadHandler, handler
from tasks.core.task import Task
from tests.tasks.deliveries import (
    change,
    delivered,
    handled,
    submitted,
)
from tests.tasks.outside import TYPE, ran, state
from tests.tasks.work import OnPurpose, insert, task, wakeups

pytestmark = pytest.mark.usefixtures("ledger")


class Business(Exception): ...


class NoSuchCustomer(Business): ...


class Flaky(NoSuchCustomer): ...


RULES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, Business, "RETRYING"),
    ({"permanent": [Business]}, Business, "DEAD"),
    ({"permanent": [Business]}, NoSuchCustomer, "DEAD"),
    ({"permanent": [NoSuchCustomer]}, Business, "RETRYING"),
    ({"retriable": [Business]}, NoSuchCustomer, "RETRYING"),
    ({"retriable": [NoSuchCustomer]}, Business, "DEAD"),
    ({"retriable": [TimeoutError], "permanent": [Business]}, OSError, "RETRYING"),
    ({"retriable": [Flaky], "permanent": [Business]}, Flaky, "RETRYING"),
    ({"retriable": [Business], "permanent": [NoSuchCustomer]}, Flaky, "DEAD"),
    ({"retriable": [OSError]}, TimeoutError, "RETRYING"),
]


@pytest.mark.parametrize("transactional", [True, False])
def test_the_most_specific_listed_class_decides(transactional: bool) -> None:
    for rules, error, expected in RULES:
        assert_decides(rules, error, expected, transactional)


def assert_decides(rules: dict[str, Any], error: type[Exception], expected: str, transactional: bool) -> None:
    def inside(_task: Task, _db: Session) -> None:
        raise error

    def outside(_task: Task) -> None:
        raise error

    with handled(TYPE, inside if transactional else outside, transactional=transactional, **rules):
        (id_,) = submitted(1, TYPE)
        delivered([id_])
    assert state(id_)[:2] == (expected, 1), (rules, error)


def test_a_class_in_both_lists_and_a_class_that_is_not_an_exception_are_refused() -> None:
    for bad in ({"retriable": [Business], "permanent": [Business]}, {"permanent": ["Business"]}, {"retriable": [int]}):
        with pytest.raises(BadHandler):
            handler("test.bad", **bad)(insert)


def test_a_verdict_wins_over_the_lists() -> None:
    for error, expected in ((Snooze(60), "RETRYING"), (Discard("no"), "DISCARDED")):

        def fail(_task: Task, error: Exception = error) -> None:
            raise error

        assert state(ran(fail, permanent=[Exception]))[0] == expected


def test_the_backoff_follows_its_list_and_repeats_the_last_value() -> None:
    def fail(_task: Task) -> None:
        raise OnPurpose

    with handled(TYPE, fail, transactional=False, backoff=[60, 300], max_attempts=5):
        (id_,) = submitted(1, TYPE)
        waits = []
        for _ in range(4):
            delivered([id_])
            found = task(id_)
            waits.append(round((found["next_retry_at"] - found["updated_at"]).total_seconds()))
            assert wakeups()[-1].due_at == found["next_retry_at"]
            change(id_, "next_retry_at = ledger.ledger_now()")
        delivered([id_])
    assert waits == [60, 300, 300, 300]
    assert state(id_) == ("DEAD", 5, "handler_error")
