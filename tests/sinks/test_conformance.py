"""Every kind of sink, at every place where a worker may die: in the end the effect of each task has happened once."""

from __future__ import annotations

import os
import uuid
from typing import Any

import pytest

import failpoint
from models.engine import engine
from sinks.recovery import recover
from tasks.core.task import Task
from tests.servers import ServersOfTests
from tests.sinks.places import PLACES, Place
from tests.tasks.deliveries import delivered, handled, submitted
from tests.tasks.lost_workers import killed, later, reclaim_lost
from tests.tasks.outside import TYPE, ran, state
from tests.tasks.work import rows

WINDOWS = [(name, window) for name, make in PLACES.items() for window in make(None).windows]  # type: ignore[arg-type]


def writing(place: Place) -> Any:
    def write(task: Task) -> None:
        place.write(task)

    return write


def recovered(stack: ServersOfTests) -> None:
    """Let the lease of a lost worker expire, then do what the reclaim tick does."""
    reclaim_lost(stack)
    recover(engine())
    later(stack, 3600)  # any backoff is over


def test_an_effect_happens_once(place: Place) -> None:
    id_ = ran(writing(place))
    assert state(id_) == ("SUCCEEDED", 0, None)
    assert place.count(id_) == 1
    assert place.left_behind() == []


def test_a_task_that_fails_after_its_write_has_one_effect_in_the_end(place: Place) -> None:
    def fail_once(task: Task) -> None:
        place.write(task)
        if task.attempt_count == 0:
            raise KeyError("no")

    id_ = ran(fail_once, times=2)
    assert state(id_) == ("SUCCEEDED", 1, None)
    assert place.count(id_) == 1
    assert place.left_behind() == []


def test_several_writes_of_one_task_all_happen_once(place: Place) -> None:
    def write_three(task: Task) -> None:
        for n in range(3):
            place.write(task, n)
        if task.attempt_count == 0:
            raise KeyError("no")

    id_ = ran(write_three, times=2)
    assert place.count(id_) == 3


@pytest.mark.guarantee
@pytest.mark.parametrize(("place", "window"), WINDOWS, indirect=["place"])
@pytest.mark.parametrize("action", ["kill", "raise"])
def test_a_worker_that_dies_or_fails_anywhere_leaves_one_effect(
    place: Place, window: str, action: str, ledger: ServersOfTests
) -> None:
    with handled(TYPE, writing(place), transactional=False, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        if action == "kill":
            killed([id_], f"{window}=kill")
        else:
            raised([id_], window)
        recovered(ledger)
        delivered([id_])
        recovered(ledger)
    assert [status for (status,) in rows("status")] == ["SUCCEEDED"]
    assert place.count(id_) == 1
    assert place.left_behind() == []


def raised(ids: list[uuid.UUID], window: str) -> None:
    """Let the failpoint raise. Where our own code does not expect an error, the worker's message fails."""
    failpoint.arm(f"{window}=raise")
    try:
        delivered(ids)
    except failpoint.FailpointHit:
        pass
    finally:
        failpoint.arm()


@pytest.mark.guarantee
def test_a_worker_that_lost_its_task_writes_nothing_more(place: Place, ledger: ServersOfTests) -> None:
    """The task runs a second time while the first worker is suspended before its write; then that one goes on."""
    seen: list[str] = []

    def write(task: Task) -> None:
        if not seen:
            seen.append("first")
            reclaim_lost(ledger)
            later(ledger, 3600)
            pid = os.fork()
            if pid == 0:
                delivered([task.id])
                os._exit(0)
            os.waitpid(pid, 0)
        place.write(task)

    with handled(TYPE, write, transactional=False, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        delivered([id_])
        recovered(ledger)
    assert place.count(id_) == 1
    assert place.left_behind() == []
