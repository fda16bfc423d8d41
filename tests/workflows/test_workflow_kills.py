"""Killed or paused in every stage: what is kept is never run again, what is not has the same key the second time."""

from __future__ import annotations

import os
import signal
from collections import Counter
from queue import SimpleQueue

import pytest

from tests.servers import ServersOfTests
from tests.tasks.deliveries import audits, leases, submitted
from tests.tasks.work import task, transitions
from tests.workflows.flows import FLOW, KEYS, SUMMARY, steps, store_calls, stored
from tests.workflows.lost_workers import taken_over, worker
from tests.workflows.outside import Outside
from workflows import TYPE

NUMBERS = range(1, len(KEYS) + 1)


def all_calls(outside: Outside) -> Counter[str]:
    return outside.calls + store_calls()


def is_done_once(outside: Outside, *, repeated: str | None) -> None:
    """Every effect once, by its key; every call once too, but for the one whose output was lost with its worker."""
    assert sorted([*outside.effects, *(key for key, _ in stored())]) == sorted(KEYS)
    assert all_calls(outside) == {key: 2 if key == repeated else 1 for key in KEYS}


def is_right(found: dict[str, object]) -> None:
    assert (found["status"], found["attempt_count"], leases()) == ("SUCCEEDED", 1, 0)
    result = found["result"]
    assert isinstance(result, dict)
    assert result["output"] == {"stored": SUMMARY, "for": {"number": 17}}
    assert stored() == [(KEYS[2], SUMMARY)]


@pytest.mark.guarantee
@pytest.mark.parametrize("number", NUMBERS)
def test_a_worker_killed_after_a_stage_was_kept_costs_no_stage_a_second_run(
    number: int, outside: Outside, stack: ServersOfTests
) -> None:
    (id_,) = submitted(1, TYPE, FLOW)
    with worker(id_, f"steps.after_keep=kill@{number}") as lost:
        assert lost.is_killed()
    assert len(steps(id_)) == number
    taken_over(stack, id_)
    is_right(task(id_))
    is_done_once(outside, repeated=None)
    attempts = [each["attempt"] for each in task(id_)["result"]["stages"]]
    assert attempts == [1] * number + [2] * (len(KEYS) - number)


@pytest.mark.guarantee
@pytest.mark.parametrize("number", NUMBERS)
def test_a_worker_killed_before_a_stage_was_kept_repeats_that_one_with_the_same_key(
    number: int, outside: Outside, stack: ServersOfTests
) -> None:
    (id_,) = submitted(1, TYPE, FLOW)
    with worker(id_, f"steps.before_keep=kill@{number}") as lost:
        assert lost.is_killed()
    assert len(steps(id_)) == number - 1
    taken_over(stack, id_)
    is_right(task(id_))
    is_done_once(outside, repeated=KEYS[number - 1])


@pytest.mark.guarantee
@pytest.mark.parametrize("place", ["before_keep", "after_keep"])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_worker_that_wakes_up_after_another_has_done_its_workflow_does_and_writes_nothing(
    number: int, place: str, outside: Outside, stack: ServersOfTests
) -> None:
    (id_,) = submitted(1, TYPE, FLOW)
    with worker(id_, f"steps.{place}=pause@{number}") as sleeper:
        assert sleeper.is_asleep()
        taken_over(stack, id_)
        before, history = task(id_), transitions(id_)
        is_right(before)
        assert sleeper.wake_up(after_seconds=3600) == 0
    assert (task(id_), transitions(id_)) == (before, history)
    is_done_once(outside, repeated=KEYS[number - 1] if place == "before_keep" else None)
    is_after_the_last = place == "after_keep" and number == len(KEYS)
    assert audits() == [(id_, "late_success" if is_after_the_last else "lease_lost")]


def test_a_worker_killed_in_the_middle_of_a_request_sends_it_again_with_the_same_key(
    outside: Outside, stack: ServersOfTests
) -> None:
    """The receiver has done it, and nobody was there for its answer."""
    (id_,) = submitted(1, TYPE, FLOW)
    pids = SimpleQueue[int]()
    outside.before_answering = lambda: os.kill(pids.get(), signal.SIGKILL)
    with worker(id_, "") as lost:
        pids.put(lost.pid)
        assert lost.is_killed()
    outside.before_answering = lambda: None
    taken_over(stack, id_)
    is_right(task(id_))
    is_done_once(outside, repeated=KEYS[0])
