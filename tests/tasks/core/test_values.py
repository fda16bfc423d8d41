"""Results and errors (P12): whatever they are, they are stored or refused, and never the failure of a whole batch."""

from __future__ import annotations

from typing import Any

import pytest

import settings
from models.engine import engine
from tasks import Snooze
from tasks.core.outcomes import Retry, outcome_of, outcome_of_result
from tasks.operations.task_details import shown
from tasks.recovery.reclaim import take_over
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


ITSELF: list[Any] = []
ITSELF.append(ITSELF)
BAD_RESULTS: dict[str, Any] = {
    "NaN": float("nan"),
    "infinity": {"a": [float("inf")]},
    "NUL": {"a": "b\x00"},
    "NUL in a key": {"b\x00": 1},
    "half a surrogate pair": "\ud83d",
    "50 MB": "x" * 50_000_000,
    "an object": object(),
    "bytes": b"x",
    "a set": {1},
    "keys of two kinds": {1: 1, "a": 1},
    "a number without end": 10**5000,
    "too deep": nested(500),
    "far too deep": nested(5000),
    "itself": ITSELF,
    "a class": Snooze,
}


class Unspeakable(Exception):
    """It cannot be shown."""

    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


class Untraceable(Exception):
    """Its traceback cannot be written."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__notes__":
            raise RuntimeError("no notes")
        return super().__getattribute__(name)


def far_away(levels: int) -> OnPurpose:
    """An error with a long way behind it, and much to say."""

    def go(levels: int) -> None:
        if levels:
            go(levels - 1)
        raise OnPurpose("x" * 100_000 + "\n" + "y" * 100_000)

    try:
        go(levels)
    except OnPurpose as error:
        return error
    raise AssertionError("it does not come back")


def noted() -> OnPurpose:
    error = OnPurpose("a")
    error.add_note("\x00" * 10_000)
    return error


BAD_ERRORS: dict[str, Exception] = {
    "NUL": OnPurpose("a\x00b"),
    "half a surrogate pair": OnPurpose("\ud83d" * 1000),
    "long": OnPurpose("x" * 50_000_000),
    "many lines": OnPurpose("\n" * 10_000),
    "nothing": OnPurpose(),
    "a traceback of 300 frames": far_away(300),
    "unspeakable": Unspeakable(),
    "untraceable": Untraceable(),
    "a group": ExceptionGroup("several", [OnPurpose("a"), ExceptionGroup("more", [Unspeakable(), ValueError("\x00")])]),
    "with notes": noted(),
}
pytestmark = pytest.mark.usefixtures("ledger")


@pytest.mark.parametrize("result", BAD_RESULTS.values(), ids=BAD_RESULTS)
def test_a_result_that_cannot_be_stored_is_the_failure_of_its_task_and_never_of_its_batch(result: Any) -> None:
    """One such value in a statement for many would fail them all."""
    ids = scripted(lambda each, _: result if each.payload["n"] == 1 else {"n": each.payload["n"]}, 3, max_attempts=2)
    delivered(ids)
    found = [(task(id_)["status"], task(id_)["attempt_count"], task(id_)["result"]) for id_ in ids]
    assert found == [("SUCCEEDED", 0, {"n": 0}), ("RETRYING", 1, None), ("SUCCEEDED", 0, {"n": 2})]
    assert task(ids[1])["error_code"] == "bad_result"
    change(ids[1], "next_retry_at = ledger.ledger_now()")
    delivered(ids)
    assert (task(ids[1])["status"], task(ids[1])["attempt_count"]) == ("DEAD", 2)


UNREADABLE = {"a long number": "repeat('1', 5000)", "deep": "repeat('[', 3000) || repeat(']', 3000)"}


@pytest.mark.parametrize("column", ["payload", "context"])
@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("how", [{}, {"many": True}, {"transactional": False}], ids=repr)
def test_what_only_postgresql_can_read_is_dead_and_never_the_end_of_its_batch(
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


def test_what_only_postgresql_can_read_is_shown_and_taken_over_as_any_other() -> None:
    ids = submitted(2)
    claimed(ids)
    change(ids[0], "payload = repeat('1', 5000)::jsonb")
    assert take_over(engine(), settings.current(), holders=["another:1"]).isolated == 2
    with engine().connect() as connection:
        assert shown(connection, ids[0]).payload == "1" * 5000


def test_a_bad_result_is_an_outcome_and_raises_nothing() -> None:
    assert {type(outcome_of_result(result)) for result in BAD_RESULTS.values()} == {Retry}


@pytest.mark.parametrize("error", BAD_ERRORS.values(), ids=BAD_ERRORS)
def test_whatever_an_error_says_of_itself_it_is_stored_and_its_neighbours_are_well(error: Exception) -> None:
    ids = inserting({1: raising(error)}, 3)
    delivered(ids)
    found = task(ids[1])
    assert (found["status"], found["attempt_count"], found["error_code"]) == ("RETRYING", 1, "handler_error")
    assert found["error_message"].startswith(type(error).__name__)
    assert 0 < len(found["error_message"]) <= 500
    assert 0 < len(found["last_error"]) <= 4000
    assert "\n" not in found["error_message"]
    are_well(ids, 1)


def test_a_failure_says_what_it_was_and_the_end_of_where_it_happened() -> None:
    outcome = outcome_of(far_away(3))
    assert isinstance(outcome, Retry)
    assert outcome.failure.message == ("OnPurpose: " + "x" * 500)[:500]
    assert outcome.failure.trace == "y" * 3999 + "\n"
