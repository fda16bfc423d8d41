"""The soft time limit interrupts the handler and no other code, and preserves the alarms of others."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy.orm import Session

from tasks.core.task import Task
from tasks.execution.time_limits import SoftTimeLimit, call_within, soft_limit
from tests.servers import wait_until
from tests.tasks.deliveries import are_well, delivered, handled, submitted
from tests.tasks.work import OnPurpose, insert, task, transitions

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


def in_a_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


def sleep_for_ever() -> None:
    """Wait in short system calls: an exception reaches a thread only between them."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        time.sleep(0.001)
    raise AssertionError("it was not interrupted")


def sleep_and_say(seconds: float, said: str) -> str:
    time.sleep(seconds)
    return said


def test_a_handler_that_takes_too_long_is_interrupted_in_a_thread_and_no_alarm_is_set() -> None:
    def limited() -> float:
        with pytest.raises(SoftTimeLimit, match=r"0\.05 s") as found:
            call_within(SOON, sleep_for_ever)
        assert found.type.__name__ == "SoftTimeLimit"
        return left()

    assert in_a_thread(limited) == 0


def test_two_threads_are_interrupted_at_their_own_limits() -> None:
    def limited(seconds: float) -> str:
        try:
            return str(call_within(seconds, sleep_and_say, 0.3, "done"))
        except SoftTimeLimit:
            return "interrupted"

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(limited, [SOON, NEVER])) == ["interrupted", "done"]


def test_an_exception_sent_at_any_moment_of_a_call_in_a_thread_strikes_that_call_or_nothing() -> None:
    """Another thread sends as fast as it can, so that it hits the beginning and the end of calls, too."""
    outcomes = set()
    next_interrupter: list[Callable[[Exception], None]] = []
    ended = threading.Event()

    def send() -> None:
        while not ended.is_set():
            for interrupt in next_interrupter:
                interrupt(OnPurpose())

    def calls() -> None:
        with soft_limit(NEVER) as limit:
            for size in range(100_000):
                if size >= 3000 and "interrupted" in outcomes:
                    break  # on a busy machine the other thread may not have had its turn before
                next_interrupter[:] = [limit.interrupter_of_next_call()]
                try:
                    limit.call(sum, range(size % 300))
                    outcomes.add("done")
                except OnPurpose:
                    outcomes.add("interrupted")
                next_interrupter.clear()
                sum(range(50))
                str(size)  # a stray exception would be raised here, and fail the test

    sender = threading.Thread(target=send)
    sender.start()
    switches = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_a_thread(calls)
    finally:
        sys.setswitchinterval(switches)
        ended.set()
        sender.join()
    assert outcomes == {"done", "interrupted"}


def test_an_exception_that_is_sent_after_its_call_has_ended_strikes_no_other_call() -> None:
    def calls() -> str:
        with soft_limit(NEVER) as limit:
            interrupt = limit.interrupter_of_next_call()
            assert limit.call(lambda: "first") == "first"
            interrupt(OnPurpose())
            return str(limit.call(sleep_and_say, SOON, "second"))

    assert in_a_thread(calls) == "second"


def test_a_handler_is_not_interrupted_while_it_writes_a_log_line() -> None:
    """It would keep the lock of the log's handler, and every other thread would wait for it for ever."""

    class SlowHandler(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            sleep_until = time.monotonic() + 4 * SOON
            while time.monotonic() < sleep_until:
                time.sleep(0.001)
            emitted.append(True)

    emitted: list[bool] = []
    log = logging.getLogger("test.slow")
    log.addHandler(SlowHandler())

    def write_and_wait() -> None:
        log.error("slow")
        sleep_for_ever()

    with pytest.raises(SoftTimeLimit):
        in_a_thread(lambda: call_within(SOON, write_and_wait))
    assert emitted == [True]


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
    assert found["error_message"] == "SoftTimeLimit: The handler exceeded its soft limit of 1 s."
    assert "wait_for_ever" in found["last_error"]
    assert len(transitions(ids[1])) == 3
    are_well(ids, 1)
    assert (left(), fired) == (0, [])
