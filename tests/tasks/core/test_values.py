"""A result or an error that cannot be stored fails only its own task, never the batch."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import settings
from models.engine import engine
from tasks import Snooze
from tasks.core.logs import OUTCOMES
from tasks.core.outcomes import Retry
from tasks.core.registry import find
from tasks.execution.decision import Situation, decide, decide_result
from tasks.operations.task_details import read_task
from tasks.recovery.reclaim import reclaim_leases
from tests.tasks.deliveries import (
    are_well,
    change,
    claimed,
    delivered,
    handled,
    inserting,
    raising,
    scripted,
    submitted,
)
from tests.tasks.work import OnPurpose, task


def nested(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


CIRCULAR: list[Any] = []
CIRCULAR.append(CIRCULAR)
BAD_RESULTS: dict[str, Any] = {
    "NaN": float("nan"),
    "infinity": {"a": [float("inf")]},
    "NUL": {"a": "b\x00"},
    "NUL in a key": {"b\x00": 1},
    "unpaired surrogate": "\ud83d",
    "50 MB": "x" * 50_000_000,
    "an object": object(),
    "bytes": b"x",
    "a set": {1},
    "keys of two types": {1: 1, "a": 1},
    "a huge number": 10**5000,
    "too deep": nested(500),
    "far too deep": nested(5000),
    "circular": CIRCULAR,
    "a class": Snooze,
}


class WithoutText(Exception):
    """Cannot be converted to text."""

    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


class WithoutTraceback(Exception):
    """Has a traceback that cannot be formatted."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__notes__":
            raise RuntimeError("no notes")
        return super().__getattribute__(name)


def long_error(levels: int) -> OnPurpose:
    """Return an error with a long traceback and a long message."""

    def go(levels: int) -> None:
        if levels:
            go(levels - 1)
        raise OnPurpose("x" * 100_000 + "\n" + "y" * 100_000)

    try:
        go(levels)
    except OnPurpose as error:
        return error
    raise AssertionError


def noted() -> OnPurpose:
    error = OnPurpose("a")
    error.add_note("\x00" * 10_000)
    return error


BAD_ERRORS: dict[str, Exception] = {
    "NUL": OnPurpose("a\x00b"),
    "unpaired surrogate": OnPurpose("\ud83d" * 1000),
    "long": OnPurpose("x" * 50_000_000),
    "many lines": OnPurpose("\n" * 10_000),
    "nothing": OnPurpose(),
    "a traceback of 300 frames": long_error(300),
    "without text": WithoutText(),
    "without traceback": WithoutTraceback(),
    "a group": ExceptionGroup("several", [OnPurpose("a"), ExceptionGroup("more", [WithoutText(), ValueError("\x00")])]),
    "with notes": noted(),
}
pytestmark = pytest.mark.usefixtures("ledger")


@pytest.mark.parametrize("result", BAD_RESULTS.values(), ids=BAD_RESULTS)
def test_a_result_that_cannot_be_stored_fails_only_its_task(result: Any) -> None:
    """One such value in a statement for many tasks would fail them all."""
    ids = scripted(lambda each, _: result if each.payload["n"] == 1 else {"n": each.payload["n"]}, 3, max_attempts=2)
    delivered(ids)
    found = [(task(id_)["status"], task(id_)["attempt_count"], task(id_)["result"]) for id_ in ids]
    assert found == [("SUCCEEDED", 0, {"n": 0}), ("RETRYING", 1, None), ("SUCCEEDED", 0, {"n": 2})]
    assert task(ids[1])["error_code"] == "bad_result"
    change(ids[1], "next_retry_at = ledger.ledger_now()")
    delivered(ids)
    assert (task(ids[1])["status"], task(ids[1])["attempt_count"]) == ("DEAD", 2)


UNPARSABLE = {"a long number": "repeat('1', 5000)", "deep": "repeat('[', 3000) || repeat(']', 3000)"}


@pytest.mark.parametrize("column", ["payload", "context"])
@pytest.mark.parametrize("value", UNPARSABLE.values(), ids=UNPARSABLE)
@pytest.mark.parametrize("how", [{}, {"many": True}, {"transactional": False}], ids=repr)
def test_a_payload_that_python_cannot_parse_is_dead_and_does_not_fail_its_batch(
    how: dict[str, bool], value: str, column: str
) -> None:
    def inside(_given: Any, _db: Any) -> None: ...

    def outside(_task: Any) -> None: ...

    with handled("test.reads", inside if how.get("transactional", True) else outside, **how):
        ids = submitted(3, "test.reads")
        change(ids[1], f"{column} = ({value})::jsonb")
        delivered(ids)
    found = [(task(id_)["status"], task(id_)["error_code"]) for id_ in ids]
    assert found == [("SUCCEEDED", None), ("DEAD", "bad_payload"), ("SUCCEEDED", None)]


@pytest.mark.usefixtures("known_handlers")
def test_a_payload_that_python_cannot_parse_is_shown_and_reclaimed_like_any_other() -> None:
    ids = submitted(2)
    claimed(ids)
    change(ids[0], "payload = repeat('1', 5000)::jsonb")
    assert reclaim_leases(engine(), settings.current(), holders=["another:1"]).isolated == 2
    with engine().connect() as connection:
        assert read_task(connection, ids[0]).payload == "1" * 5000


def test_a_result_that_cannot_be_stored_raises_nothing() -> None:
    assert {type(decide_result(result, Situation(find("test.insert")))) for result in BAD_RESULTS.values()} == {Retry}


@pytest.mark.parametrize("error", BAD_ERRORS.values(), ids=BAD_ERRORS)
def test_an_error_of_any_shape_is_stored_and_does_not_harm_its_batch(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest would show the exception in its report, which cannot be sent from one of its processes to another.
    monkeypatch.setattr(logging.getLogger(OUTCOMES), "disabled", True)
    ids = inserting({1: raising(error)}, 3)
    delivered(ids)
    found = task(ids[1])
    assert (found["status"], found["attempt_count"], found["error_code"]) == ("RETRYING", 1, "handler_error")
    assert found["error_message"].startswith(type(error).__name__)
    assert 0 < len(found["error_message"]) <= 500
    assert 0 < len(found["last_error"]) <= 4000
    assert "\n" not in found["error_message"]
    are_well(ids, 1)


def test_a_failure_has_a_sentence_and_the_end_of_its_traceback() -> None:
    outcome = decide(long_error(3), Situation(find("test.insert")))
    assert isinstance(outcome, Retry)
    assert outcome.failure.message == ("OnPurpose: " + "x" * 500)[:500]
    assert outcome.failure.trace == "y" * 3999 + "\n"
