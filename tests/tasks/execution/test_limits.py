"""The soft time limit: an exception in the handler, never anywhere else, and everybody keeps their own alarms."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from tasks.core.task import Task
from tasks.execution.limits import SoftTimeLimit, call_within
from tests.servers import ServersOfTests
from tests.tasks.deliveries import are_well, clean_sink, delivered, handled, submitted
from tests.tasks.work import insert, task, transitions

SOON = 0.05
NEVER = 600.0


@pytest.fixture
def ledger(stack: ServersOfTests) -> Iterator[ServersOfTests]:
    with clean_sink():
        yield stack


@pytest.fixture(autouse=True)
def alarms() -> Iterator[None]:
    """Our own timer, and what wake-ups without one of them, is an error; pytest's timer comes back."""
    before, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, rang)
    heard.clear()
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *timer)


heard: list[int] = []


def rang(number: int, _frame: Any) -> None:
    heard.append(number)


def wait_for_ever() -> None:
    threading.Event().wait(20)
    raise AssertionError("nobody interrupted it")


def left() -> float:
    return signal.getitimer(signal.ITIMER_REAL)[0]


def test_a_handler_that_takes_too_long_is_interrupted() -> None:
    with pytest.raises(SoftTimeLimit, match=r"0\.05 s"):
        call_within(SOON, wait_for_ever)


def test_afterwards_no_alarm_is_set_and_the_old_handler_is_back() -> None:
    assert call_within(NEVER, lambda a, b: a + b, 1, 2) == 3
    assert (left(), signal.getsignal(signal.SIGALRM)) == (0, rang)
    with pytest.raises(SoftTimeLimit):
        call_within(SOON, wait_for_ever)
    assert (left(), signal.getsignal(signal.SIGALRM)) == (0, rang)


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_afterwards_means_however_it_ended(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        call_within(NEVER, fail)
    assert (left(), signal.getsignal(signal.SIGALRM)) == (0, rang)


def test_an_alarm_that_was_set_before_has_the_time_that_is_left() -> None:
    signal.setitimer(signal.ITIMER_REAL, 1000, 7)
    call_within(NEVER, lambda: None)
    remaining, interval = signal.getitimer(signal.ITIMER_REAL)
    assert (990 < remaining <= 1000, interval) == (True, 7)


def test_an_alarm_that_should_have_woken_meanwhile_wakeups_afterwards() -> None:
    signal.setitimer(signal.ITIMER_REAL, SOON)
    call_within(NEVER, time.sleep, 2 * SOON)
    deadline = time.monotonic() + 20
    while not heard:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert heard == [signal.SIGALRM]


def test_a_handler_may_use_alarms_itself_and_they_end_with_it() -> None:
    mine: list[int] = []

    def alarming() -> None:
        signal.signal(signal.SIGALRM, lambda number, _frame: mine.append(number))
        signal.setitimer(signal.ITIMER_REAL, SOON)
        while not mine:
            time.sleep(0.001)
        signal.alarm(1000)

    call_within(NEVER, alarming)
    assert (mine, heard) == ([signal.SIGALRM], [])
    assert (left(), signal.getsignal(signal.SIGALRM)) == (0, rang)


def test_an_alarm_at_the_very_end_is_the_handlers_or_nobodys() -> None:
    """It wake-ups at any moment of a call, also while the timer is being stopped: inside, or not at all."""
    outcomes = set()
    for step in range(400):
        try:
            call_within(1e-6 + step * 5e-7, sum, range(500))
            outcomes.add("done")
        except SoftTimeLimit:
            outcomes.add("interrupted")
        assert (left(), signal.getsignal(signal.SIGALRM)) == (0, rang)
    assert outcomes == {"done", "interrupted"}
    assert heard == []


def test_outside_the_main_thread_there_is_no_timer_and_no_error() -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(call_within(SOON, left)))
    thread.start()
    thread.join()
    assert found == [0]


@pytest.mark.usefixtures("ledger")
def test_a_task_that_takes_too_long_is_tried_again_and_its_neighbours_are_not_touched() -> None:
    def slow(each: Task, db: Session) -> None:
        insert(each, db)
        if each.payload == 1:
            wait_for_ever()

    with handled("test.slow", slow, soft_limit_seconds=0.3):
        ids = submitted(3, "test.slow", lambda n: n)
        delivered(ids)
    found = task(ids[1])
    assert (found["status"], found["attempt_count"], found["error_code"]) == ("RETRYING", 1, "timeout")
    assert found["error_message"] == "SoftTimeLimit: The handler took longer than 0.3 s."
    assert "wait_for_ever" in found["last_error"]
    assert len(transitions(ids[1])) == 3
    are_well(ids, 1)
    assert (left(), heard) == (0, [])
