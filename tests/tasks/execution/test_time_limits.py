"""The soft time limit interrupts the handler and no other code, and preserves the alarms of others."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from tasks.core.task import Task
from tasks.execution.time_limits import SoftTimeLimit, call_within
from tests.servers import wait_until
from tests.tasks.deliveries import are_well, delivered, handled, submitted
from tests.tasks.work import insert, task, transitions

SOON = 0.05
NEVER = 600.0


@pytest.fixture(autouse=True)
def alarms() -> Iterator[None]:
    """Record alarms that fire outside a call; pytest's own timer is restored afterwards."""
    before, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, record)
    fired.clear()
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *timer)


fired: list[int] = []


def record(number: int, _frame: Any) -> None:
    fired.append(number)


def wait_for_ever() -> None:
    threading.Event().wait(20)
    raise AssertionError("it was not interrupted")


def left() -> float:
    return signal.getitimer(signal.ITIMER_REAL)[0]


def test_a_handler_that_takes_too_long_is_interrupted() -> None:
    with pytest.raises(SoftTimeLimit, match=r"0\.05 s"):
        call_within(SOON, wait_for_ever)


def test_after_a_call_no_alarm_is_set_and_the_old_handler_is_restored() -> None:
    assert call_within(NEVER, lambda a, b: a + b, 1, 2) == 3
    assert (left(), signal.getsignal(signal.SIGALRM)) == (0, record)
    with pytest.raises(SoftTimeLimit):
        call_within(SOON, wait_for_ever)
    assert (left(), signal.getsignal(signal.SIGALRM)) == (0, record)


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_after_a_call_that_raises_no_alarm_is_set_and_the_old_handler_is_restored(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        call_within(NEVER, fail)
    assert (left(), signal.getsignal(signal.SIGALRM)) == (0, record)


def test_an_alarm_that_was_set_before_keeps_its_remaining_time() -> None:
    signal.setitimer(signal.ITIMER_REAL, 1000, 7)
    call_within(NEVER, lambda: None)
    remaining, interval = signal.getitimer(signal.ITIMER_REAL)
    assert (990 < remaining <= 1000, interval) == (True, 7)


def test_an_alarm_that_was_due_during_a_call_fires_afterwards() -> None:
    signal.setitimer(signal.ITIMER_REAL, SOON)
    call_within(NEVER, time.sleep, 2 * SOON)
    wait_until(lambda: fired, "the alarm fires")
    assert fired == [signal.SIGALRM]


def test_a_handler_may_set_alarms_and_they_end_with_it() -> None:
    mine: list[int] = []

    def alarming() -> None:
        signal.signal(signal.SIGALRM, lambda number, _frame: mine.append(number))
        signal.setitimer(signal.ITIMER_REAL, SOON)
        while not mine:
            time.sleep(0.001)
        signal.alarm(1000)

    call_within(NEVER, alarming)
    assert (mine, fired) == ([signal.SIGALRM], [])
    assert (left(), signal.getsignal(signal.SIGALRM)) == (0, record)


def test_an_alarm_at_the_very_end_of_a_call_interrupts_the_handler_or_nothing() -> None:
    """The alarm fires at any moment of a call, also while the timer is being stopped."""
    outcomes = set()
    for step in range(400):
        try:
            call_within(1e-6 + step * 5e-7, sum, range(500))
            outcomes.add("done")
        except SoftTimeLimit:
            outcomes.add("interrupted")
        assert (left(), signal.getsignal(signal.SIGALRM)) == (0, record)
    assert outcomes == {"done", "interrupted"}
    assert fired == []


def test_outside_the_main_thread_there_is_no_limit_and_no_error() -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(call_within(SOON, left)))
    thread.start()
    thread.join()
    assert found == [0]


@pytest.mark.usefixtures("ledger", "known_handlers")
def test_a_task_that_takes_too_long_is_retried_and_the_rest_of_its_batch_succeeds() -> None:
    def slow(each: Task, db: Session) -> None:
        insert(each, db)
        if each.payload == 1:
            wait_for_ever()

    with handled("test.slow", slow, soft_limit_seconds=1):
        ids = submitted(3, "test.slow", lambda n: n)
        delivered(ids)
    found = task(ids[1])
    assert (found["status"], found["attempt_count"], found["error_code"]) == ("RETRYING", 1, "timeout")
    assert found["error_message"] == "SoftTimeLimit: The handler took longer than 1 s."
    assert "wait_for_ever" in found["last_error"]
    assert len(transitions(ids[1])) == 3
    are_well(ids, 1)
    assert (left(), fired) == (0, [])
