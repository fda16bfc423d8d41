"""Waiting for an unreachable ledger: the pauses stay short, a limit is kept, and no other error is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolIsEmpty

from models.errors import LeaseLost, Unreachable
from models.ledger_outage import REPETITIONS, outage, wait_for_ledger

LONG = 30  # calls without an answer
IS_LOST = {"connection_invalidated": True}


def database_error(sqlstate: str | None, **how: Any) -> DBAPIError:
    original: Any = SimpleNamespace(pgcode=sqlstate)
    return DBAPIError("", {}, original, **how)


OUTAGES = {
    "no connection": Unreachable(),
    "an empty pool": PoolIsEmpty(),
    "a lost connection": database_error(None, **IS_LOST),
    "a shutdown": database_error("57P01"),
    "a start": database_error("57P03"),
    "a standby": database_error("25006"),
}
OTHERS = {
    "a bug": ValueError("no"),
    "a lost lease": LeaseLost(),
    "a duplicate key": database_error("23505"),
    "a timeout": database_error("57014"),
}


@pytest.fixture(autouse=True)
def answered() -> Iterator[None]:
    """Forget the outage of each test; otherwise the next test of this process would begin in it."""
    yield
    outage.note_answer()


class Clock:
    """A clock that moves only while the ledger is waited for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        assert len(self.pauses) < 2 * LONG, "the waiting does not end"
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("models.ledger_outage.time", clock)
    return clock


def failing(error: Exception, times: int | None = None) -> tuple[Callable[[], str], list[Exception]]:
    """Return a call that raises this error, always or so many times, and a list that counts its calls."""
    calls: list[Exception] = []

    def call() -> str:
        calls.append(error)
        if times is None or len(calls) <= times:
            raise error
        return "answered"

    return call, calls


@pytest.mark.parametrize("error", OUTAGES.values(), ids=OUTAGES)
def test_the_pauses_of_a_long_outage_grow_and_never_exceed_a_second(error: Exception, clock: Clock) -> None:
    call, calls = failing(error, LONG)
    assert wait_for_ledger(call, pause=clock.pause) == "answered"
    assert (len(calls), len(clock.pauses)) == (LONG + 1, LONG)
    growing = clock.pauses[: clock.pauses.index(1.0) + 1]
    assert clock.pauses[len(growing) :] == [1.0] * (LONG - len(growing))
    assert growing == sorted(set(growing)), "each pause is longer than the one before"
    assert len(growing) > 3
    assert growing[0] <= 0.1, "a short outage must not cost a long pause"


@pytest.mark.parametrize("seconds", [0.0, 0.3, 5.0])
def test_a_limit_ends_the_waiting_with_the_error_and_is_not_exceeded(seconds: float, clock: Clock) -> None:
    call, calls = failing(Unreachable("no answer"))
    with pytest.raises(Unreachable, match="no answer"):
        wait_for_ledger(call, seconds=seconds, pause=clock.pause)
    assert seconds - 1 < clock.now <= seconds, "it gives up early by less than one pause"
    assert len(calls) == len(clock.pauses) + 1


@pytest.mark.parametrize("error", OTHERS.values(), ids=OTHERS)
def test_an_error_that_is_no_outage_is_raised_at_once_and_reports_none(error: Exception, clock: Clock) -> None:
    call, calls = failing(error)
    with pytest.raises(type(error)):
        wait_for_ledger(call, pause=clock.pause)
    assert (len(calls), clock.pauses, outage.is_on) == (1, [], False)


def test_a_deadlock_is_repeated_a_few_times_without_a_pause_and_not_for_ever(clock: Clock) -> None:
    call, calls = failing(database_error("40P01"), REPETITIONS)
    assert wait_for_ledger(call, pause=clock.pause) == "answered"
    call, calls = failing(database_error("40P01"))
    with pytest.raises(DBAPIError):
        wait_for_ledger(call, pause=clock.pause)
    assert (len(calls), clock.pauses) == (REPETITIONS + 1, [])


def test_a_pause_that_raises_ends_the_waiting(clock: Clock) -> None:
    """The pause of a process that must stop raises; otherwise it would wait for the ledger for ever."""

    def stop(_seconds: float) -> None:
        raise KeyboardInterrupt

    call, calls = failing(Unreachable())
    with pytest.raises(KeyboardInterrupt):
        wait_for_ledger(call, pause=stop)
    assert len(calls) == 1
