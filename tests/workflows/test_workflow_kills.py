"""Workers killed or paused in every stage: a committed stage never runs again, another one repeats with its key."""

from __future__ import annotations

import os
import signal
from collections import Counter
from queue import SimpleQueue

import pytest

from tests.servers import ServersOfTests
from tests.tasks.deliveries import audits, leases, submitted
from tests.tasks.work import task, transitions
from tests.workflows.flows import FLOW, KEYS, SUMMARY, count_store_calls, read_steps, read_stored
from tests.workflows.lost_workers import reclaim_and_run, worker
from tests.workflows.outside import Outside
from workflows import TYPE

NUMBERS = range(1, len(KEYS) + 1)
PAUSE_SECONDS = 600  # longer than a lease; after the time limit of a handler its process would kill itself


def count_calls(outside: Outside) -> Counter[str]:
    return outside.calls + count_store_calls()


def assert_effects_happened_once(outside: Outside, *, repeated: str | None) -> None:
    """Every effect happened once, and every call too, except the one whose output was lost with its worker."""
    assert sorted([*outside.effects, *(key for key, _ in read_stored())]) == sorted(KEYS)
    assert count_calls(outside) == {key: 2 if key == repeated else 1 for key in KEYS}


def assert_succeeded(found: dict[str, object]) -> None:
    assert (found["status"], found["attempt_count"], leases()) == ("SUCCEEDED", 1, 0)
    result = found["result"]
    assert isinstance(result, dict)
    assert result["output"] == {"stored": SUMMARY, "for": {"number": 17}}
    assert read_stored() == [(KEYS[2], SUMMARY)]


@pytest.mark.guarantee
@pytest.mark.parametrize("number", NUMBERS)
def test_a_worker_killed_after_a_stage_was_committed_repeats_no_stage(
    number: int, outside: Outside, stack: ServersOfTests
) -> None:
    (id_,) = submitted(1, TYPE, FLOW)
    with worker(id_, f"steps.after_keep=kill@{number}") as lost:
        assert lost.is_killed()
    assert len(read_steps(id_)) == number
    reclaim_and_run(stack, id_)
    assert_succeeded(task(id_))
    assert_effects_happened_once(outside, repeated=None)
    attempts = [each["attempt"] for each in task(id_)["result"]["stages"]]
    assert attempts == [1] * number + [2] * (len(KEYS) - number)


@pytest.mark.guarantee
@pytest.mark.parametrize("number", NUMBERS)
def test_a_worker_killed_before_a_stage_was_committed_repeats_only_that_stage_with_the_same_key(
    number: int, outside: Outside, stack: ServersOfTests
) -> None:
    (id_,) = submitted(1, TYPE, FLOW)
    with worker(id_, f"steps.before_keep=kill@{number}") as lost:
        assert lost.is_killed()
    assert len(read_steps(id_)) == number - 1
    reclaim_and_run(stack, id_)
    assert_succeeded(task(id_))
    assert_effects_happened_once(outside, repeated=KEYS[number - 1])


@pytest.mark.guarantee
@pytest.mark.parametrize("place", ["before_keep", "after_keep"])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_worker_that_resumes_after_its_task_was_reclaimed_does_and_writes_nothing(
    number: int, place: str, outside: Outside, stack: ServersOfTests
) -> None:
    (id_,) = submitted(1, TYPE, FLOW)
    with worker(id_, f"steps.{place}=pause@{number}") as paused:
        assert paused.is_paused()
        reclaim_and_run(stack, id_)
        before, history = task(id_), transitions(id_)
        assert_succeeded(before)
        assert paused.resume(after_seconds=PAUSE_SECONDS) == 0
    assert (task(id_), transitions(id_)) == (before, history)
    assert_effects_happened_once(outside, repeated=KEYS[number - 1] if place == "before_keep" else None)
    is_after_the_last = place == "after_keep" and number == len(KEYS)
    assert audits() == [(id_, "late_success" if is_after_the_last else "lease_lost")]


def test_a_worker_killed_during_a_request_sends_it_again_with_the_same_key(
    outside: Outside, stack: ServersOfTests
) -> None:
    """The receiver has performed the effect, but its answer was lost."""
    (id_,) = submitted(1, TYPE, FLOW)
    pids = SimpleQueue[int]()
    outside.before_answering = lambda: os.kill(pids.get(), signal.SIGKILL)
    with worker(id_, "") as lost:
        pids.put(lost.pid)
        assert lost.is_killed()
    outside.before_answering = lambda: None
    reclaim_and_run(stack, id_)
    assert_succeeded(task(id_))
    assert_effects_happened_once(outside, repeated=KEYS[0])
