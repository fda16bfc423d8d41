"""A worker that stops gives back what it has, and burns nothing; a handler that only says so has failed (P12)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from celery.exceptions import WorkerTerminate

from tasks import Snooze
from tasks.core.task import Task
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import audits, counted, delivered, handled, inserting, leases, raising, scripted, submitted
from tests.tasks.work import OnPurpose, effects, rows, task, transitions, wakeups

pytestmark = pytest.mark.usefixtures("ledger")


@pytest.fixture
def told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a child that has got its signal."""
    monkeypatch.setattr("tasks.execution.stopping.terminate_handler_fired", lambda: True)


@pytest.mark.usefixtures("told_to_end")
@pytest.mark.parametrize("stop", [SystemExit(0), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_worker_that_stops_gives_everything_back_and_burns_nothing(stop: BaseException, place: int) -> None:
    ids = inserting({place: raising(stop)}, 5)
    before = counted()
    with pytest.raises(type(stop)):
        delivered(ids)
    assert rows("status, attempt_count, isolated, last_error") == [("QUEUED", 0, False, None)] * 5
    assert (effects(), leases(), audits()) == ({}, 0, [])
    assert counted() - before == {"released": 5}
    assert {transitions(id_, "message")[-1][0] for id_ in ids} == {f"the worker stopped: {type(stop).__name__}"}
    assert set(wakeups()[-1].ids) == set(ids)
    assert wakeups()[-1].due_at is None


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(SystemExit(0), "QUEUED"), (KeyboardInterrupt(), "QUEUED"), (OnPurpose(), "RETRYING")],
    ids=repr,
)
@pytest.mark.parametrize("place", ["failpoint", "_wake_again", "Batch"])
def test_a_worker_that_stops_between_a_claim_and_its_batch_gives_it_back(
    stop: BaseException, expected: str, place: str, ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike(*_: Any, **__: Any) -> None:
        raise stop

    ids = submitted(3)
    monkeypatch.setattr(f"tasks.ingest.{place}", strike)
    with pytest.raises(type(stop)):
        delivered(ids)
    monkeypatch.undo()
    assert (rows(), leases()) == ([(expected, 0)] * 3, 0)
    move(ledger, 2)
    delivered(ids)
    assert effects() == dict.fromkeys(ids, 1)


def test_a_worker_that_stops_while_it_reads_what_it_has_claimed_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(*_: Any) -> None:
        raise SystemExit

    (id_,) = submitted(1)
    monkeypatch.setattr("tasks.execution.claim._sorted", strike)
    with pytest.raises(SystemExit):
        delivered([id_])
    assert (rows(), leases()) == ([("QUEUED", 0)], 0)


@pytest.mark.usefixtures("told_to_end")
def test_a_worker_that_stops_one_by_one_keeps_what_is_settled() -> None:
    ids = inserting({0: raising(OnPurpose()), 3: raising(SystemExit())}, 5)
    with pytest.raises(SystemExit):
        delivered(ids)
    assert rows() == [("RETRYING", 1), ("SUCCEEDED", 0), ("SUCCEEDED", 0), ("QUEUED", 0), ("QUEUED", 0)]
    assert effects() == dict.fromkeys(ids[1:3], 1)
    assert leases() == 0


@pytest.fixture
def deaf_to_keys() -> Iterator[None]:
    """As in a child of a worker: Ctrl-C is its parent's matter."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


NO_EXCEPTIONS = [asyncio.CancelledError(), GeneratorExit(), SystemExit(1), KeyboardInterrupt()]


@pytest.mark.usefixtures("deaf_to_keys")
@pytest.mark.parametrize("transactional", [True, False])
@pytest.mark.parametrize("error", NO_EXCEPTIONS, ids=repr)
def test_what_is_no_exception_but_the_handlers_own_is_a_failure(error: BaseException, transactional: bool) -> None:
    """It would be given back for ever, burn nothing, and end a process each time."""

    def outside(each: Task) -> None:
        if each.payload == 1:
            raise error

    def inside(each: Task, _db: Any) -> None:
        outside(each)

    with handled(
        "test.exit", inside if transactional else outside, transactional=transactional, max_attempts=2, backoff=[0]
    ):
        ids = submitted(3, "test.exit", lambda n: n)
        delivered(ids)
        assert rows() == [("SUCCEEDED", 0), ("RETRYING", 1), ("SUCCEEDED", 0)]
        delivered(ids)
    assert rows() == [("SUCCEEDED", 0), ("DEAD", 2), ("SUCCEEDED", 0)]
    assert str(task(ids[1])["error_message"]).startswith(type(error).__name__)


@pytest.mark.usefixtures("told_to_end")
def test_a_worker_that_stops_elsewhere_gives_the_rest_back() -> None:
    def stop(each: Task) -> None:
        if each.payload == 1:
            raise SystemExit

    with handled("test.stop", stop, transactional=False):
        ids = submitted(3, "test.stop", lambda n: n)
        with pytest.raises(SystemExit):
            delivered(ids)
    assert rows() == [("SUCCEEDED", 0), ("QUEUED", 0), ("QUEUED", 0)]
    assert leases() == 0


@pytest.mark.usefixtures("told_to_end")
@pytest.mark.parametrize("transactional", [True, False])
def test_a_handler_that_fails_to_clean_up_for_a_worker_that_stops_does_not_keep_it(transactional: bool) -> None:
    def outside(each: Task) -> None:
        if each.payload == 1:
            try:
                raise SystemExit
            finally:
                raise OSError("the socket is closed")

    def inside(each: Task, _db: Any) -> None:
        outside(each)

    with handled("test.exit", inside if transactional else outside, transactional=transactional):
        ids = submitted(3, "test.exit", lambda n: n)
        with pytest.raises(SystemExit):
            delivered(ids)
    assert rows()[1:] == [("QUEUED", 0)] * 2
    assert leases() == 0


@pytest.mark.usefixtures("told_to_end")
def test_a_verdict_of_a_handler_that_is_told_to_end_is_heeded() -> None:
    def snooze(_task: Task, _db: Any) -> None:
        try:
            raise SystemExit
        finally:
            raise Snooze(60)

    delivered(scripted(snooze))
    assert rows() == [("RETRYING", 0)]


def test_a_worker_whose_handlers_run_in_its_main_process_gives_back_what_ends_with_it() -> None:
    ids = inserting({1: raising(WorkerTerminate(1))}, 3)
    with pytest.raises(WorkerTerminate):
        delivered(ids)
    assert (rows(), leases()) == ([("QUEUED", 0)] * 3, 0)


@pytest.mark.parametrize("error", [None, SystemExit(0), OnPurpose()], ids=repr)
@pytest.mark.parametrize("transactional", [True, False])
def test_a_child_that_a_handler_has_forked_ends_with_it_and_has_nothing_to_say(
    error: BaseException | None, transactional: bool
) -> None:
    said: list[int] = []
    parent = os.getpid()

    def outside(_task: Task) -> None:
        if (child := os.fork()) == 0:
            if error:
                raise error
            return
        said.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    def inside(each: Task, _db: Any) -> None:
        outside(each)

    with handled("test.fork", inside if transactional else outside, transactional=transactional):
        try:
            delivered(submitted(1, "test.fork"))
        finally:
            if os.getpid() != parent:
                os._exit(99)
    assert said == [int(isinstance(error, OnPurpose))]
    assert (rows(), leases()) == ([("SUCCEEDED", 0)], 0)
