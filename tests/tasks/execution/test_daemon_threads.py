"""Threads of an event loop take calls like those of a ThreadPoolExecutor, but the end of the process waits for none."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from settings import ROOT
from tasks.execution.daemon_threads import DaemonThreads
from tests.servers import wait_until

PATIENCE_SECONDS = 20.0
HANGS = """
import asyncio, time
from tasks.execution.event_loop import event_loop

async def hang():
    asyncio.create_task(asyncio.to_thread(time.sleep, 3600))
    await asyncio.sleep(0.1)

event_loop().run_until_complete(hang())
print("the end")
"""


@pytest.fixture
def threads() -> Iterator[DaemonThreads]:
    threads = DaemonThreads(2, name="threads of a test")
    yield threads
    threads.shutdown(cancel_futures=True)
    wait_until(lambda: not names(), "the threads have ended")


def names() -> set[str]:
    return {each.name for each in threading.enumerate() if each.name.startswith("threads of a test")}


def test_a_process_ends_although_a_function_hangs_in_a_thread_of_its_event_loop() -> None:
    command = [sys.executable, "-c", HANGS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "the end\n"


def test_calls_share_the_threads_and_return_or_raise(threads: DaemonThreads) -> None:
    both = threading.Barrier(2)
    meeting = [threads.submit(both.wait, PATIENCE_SECONDS) for _ in range(10)]
    assert sorted(each.result(PATIENCE_SECONDS) for each in meeting) == [0] * 5 + [1] * 5
    with pytest.raises(ValueError, match="invalid literal"):
        threads.submit(int, "no number").result(PATIENCE_SECONDS)
    assert names() == {"threads of a test-0", "threads of a test-1"}


def test_a_thread_that_is_idle_takes_the_next_call(threads: DaemonThreads) -> None:
    for _ in range(5):
        assert threads.submit(divmod, 7, 2).result(PATIENCE_SECONDS) == (3, 1)
        wait_until(lambda: threads._idle._value > 0, "the thread is idle")
    assert names() == {"threads of a test-0"}


def test_after_the_end_calls_that_wait_are_cancelled_and_new_ones_refused(threads: DaemonThreads) -> None:
    end = threading.Event()
    running = [threads.submit(end.wait, PATIENCE_SECONDS) for _ in range(2)]
    waiting: Future[bool] = threads.submit(end.wait, PATIENCE_SECONDS)
    wait_until(lambda: all(each.running() for each in running), "both threads are busy")
    threads.shutdown(cancel_futures=True)
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="no further calls"):
        threads.submit(end.wait)
    end.set()
    assert [each.result(PATIENCE_SECONDS) for each in running] == [True, True]


def test_a_call_that_was_cancelled_before_it_began_is_left_out(threads: DaemonThreads) -> None:
    end, called = threading.Event(), threading.Event()
    for _ in range(2):
        threads.submit(end.wait, PATIENCE_SECONDS)
    threads.submit(called.set).cancel()
    end.set()
    threads.submit(time.sleep, 0).result(PATIENCE_SECONDS)
    assert not called.is_set()
