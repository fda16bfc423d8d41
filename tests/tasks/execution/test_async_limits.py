"""Async handlers with limits: a waiting task gets a free place as soon as its limit allows that, and never earlier."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from tasks.core.task import Task
from tasks.execution import due_tasks, run_async
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import change, delivered, leases, submitted
from tests.tasks.limited import TYPE, limited, waiting
from tests.tasks.work import rows

PATIENCE_SECONDS = 20.0
SLOW = 0  # the payload of a task that runs until the handler has started often enough
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


@dataclass
class Starts:
    """What a handler has seen: its tasks, when they started, and how many ran at once."""

    started_at: list[float] = field(default_factory=list)
    payloads: list[Any] = field(default_factory=list)
    running: int = 0
    most_at_once: int = 0


def recording(starts: Starts, *, slow_until: int = 0) -> Callable[[Task], Coroutine[Any, Any, None]]:
    """Return an async handler that records its tasks. The slow one runs until `slow_until` tasks have started."""

    async def run(task: Task) -> None:
        starts.started_at.append(time.monotonic())
        starts.payloads.append(task.payload)
        starts.running += 1
        starts.most_at_once = max(starts.most_at_once, starts.running)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while task.payload == SLOW and len(starts.payloads) < slow_until:
            assert time.monotonic() < deadline, f"only {starts.payloads} have started beside the slow task"
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        starts.running -= 1

    return run


def test_tasks_over_the_rate_wait_without_an_attempt_until_it_allows_them(stack: ServersOfTests) -> None:
    starts = Starts()
    with limited(recording(starts), rate="60/h", concurrency=10):
        ids = submitted(3, TYPE, lambda n: n + 1)
        for expected in (1, 2, 3):
            delivered(ids)
            delivered(ids)
            assert (len(starts.payloads), waiting()) == (expected, 3 - expected)
            move(stack, 61)
    assert rows("status, attempt_count") == [("SUCCEEDED", 0)] * 3


def test_a_rate_is_kept_up_and_never_exceeded_while_a_slow_task_runs() -> None:
    """The process takes no message before its slow task has ended, so it looks for tasks that have waited."""
    starts = Starts()
    with limited(recording(starts, slow_until=10), rate="4/s", concurrency=10):
        delivered(submitted(10, TYPE, lambda n: n))
    assert rows("status, attempt_count") == [("SUCCEEDED", 0)] * 10
    assert sorted(starts.payloads) == list(range(10))
    assert leases() == 0
    for number, at in enumerate(starts.started_at, 1):
        assert number <= 4 + 4 * (at - starts.started_at[0]) + 0.5, f"more than 4, and 4 each second: {starts}"


def test_a_limit_behind_others_that_are_used_up_is_looked_at_as_well() -> None:
    """One look takes as many limits as places are free: at first two whose tasks have to wait for a minute."""
    starts = Starts()
    with limited(recording(starts, slow_until=5), rate="60/h", limit_by="tenant", concurrency=3):
        slow = submitted(1, TYPE, SLOW)
        tenants = [*submitted(2, TYPE, {"tenant": "a"}), *submitted(2, TYPE, {"tenant": "b"})]
        later = [*submitted(1, TYPE, {"tenant": "c"}), *submitted(1, TYPE, {"tenant": "d"})]
        delivered([*slow, *tenants, *later])
    assert [payload and payload["tenant"] for payload in starts.payloads] == [SLOW, "a", "b", "c", "d"]
    assert starts.most_at_once <= 3


def test_a_place_of_max_running_is_filled_again_at_once_while_a_slow_task_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_async, "FIRST_LOOK_SECONDS", PATIENCE_SECONDS)
    starts = Starts()
    with limited(recording(starts, slow_until=30), max_running=2, concurrency=10):
        delivered(submitted(30, TYPE, lambda n: n))
    assert rows("status, attempt_count") == [("SUCCEEDED", 0)] * 30
    assert starts.most_at_once == 2
    assert leases() == 0


def test_waiting_tasks_give_way_to_another_type_in_the_queue(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_tasks, "FAIR_SECONDS", 0.0)
    submitted(1, "test.insert")
    move(stack, 1)
    starts = Starts()
    with limited(recording(starts), max_running=1, concurrency=10):
        ids = submitted(3, TYPE, lambda n: n + 1)
        delivered(ids)
        assert len(starts.payloads) == 1
        monkeypatch.undo()
        delivered(ids)
        assert len(starts.payloads) == 3


@pytest.mark.parametrize("column", ["isolated = true", "partition_key = 'one', key_seq = 1"])
def test_tasks_that_other_tasks_must_not_accompany_are_left_to_their_wakeups(column: str) -> None:
    at_once: list[int] = []

    async def run(task: Task) -> None:
        at_once.append(task.payload)
        await asyncio.sleep(1.0 if task.payload == SLOW else 0)
        if task.payload == SLOW:
            assert at_once == [SLOW]

    with limited(run, max_running=2, concurrency=10):
        (slow,), (other,) = submitted(1, TYPE, SLOW), submitted(1, TYPE, 1)
        change(other, column)
        delivered([slow, other])
        delivered([other])
    assert rows("status, attempt_count") == [("SUCCEEDED", 0)] * 2
