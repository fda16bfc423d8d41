"""A worker that stops releases its tasks without charging them; a handler that raises SystemExit itself fails."""

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

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


@pytest.fixture
def worker_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process look like a child of a worker that has received its signal."""
    monkeypatch.setattr("tasks.execution.stopping.terminate_handler_fired", lambda: True)


@pytest.mark.usefixtures("worker_stops")
@pytest.mark.parametrize("stop", [SystemExit(0), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_worker_that_stops_releases_all_tasks_without_charging_them(stop: BaseException, place: int) -> None:
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
@pytest.mark.parametrize("place", ["failpoint", "_wake_again", "find"])
def test_a_worker_that_stops_between_claim_and_batch_releases_its_tasks(
    stop: BaseException, expected: str, place: str, ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike(*_: Any, **__: Any) -> None:
        raise stop

    ids = submitted(3)
    monkeypatch.setattr(f"tasks.execution.deliver.{place}", strike)
    with pytest.raises(type(stop)):
        delivered(ids)
    monkeypatch.undo()
    assert (rows(), leases()) == ([(expected, 0)] * 3, 0)
    move(ledger, 2)
    delivered(ids)
    assert effects() == dict.fromkeys(ids, 1)


def test_a_worker_that_stops_while_it_reads_its_claim_releases_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(*_: Any) -> None:
        raise SystemExit

    (id_,) = submitted(1)
    monkeypatch.setattr("tasks.execution.claim._by_verdict", strike)
    with pytest.raises(SystemExit):
        delivered([id_])
    assert (rows(), leases()) == ([("QUEUED", 0)], 0)


@pytest.mark.usefixtures("worker_stops")
def test_a_worker_that_stops_while_it_runs_a_batch_in_parts_keeps_the_settled_ones() -> None:
    does = {0: raising(OnPurpose()), 3: raising(OnPurpose()), 5: raising(SystemExit())}
    ids = inserting(does, 6)
    with pytest.raises(SystemExit):
        delivered(ids)
    assert rows() == [
        *[("RETRYING", 1), ("SUCCEEDED", 0), ("SUCCEEDED", 0), ("RETRYING", 1), ("QUEUED", 0), ("QUEUED", 0)]
    ]
    assert effects() == dict.fromkeys(ids[1:3], 1)
    assert leases() == 0


@pytest.fixture
def ignoring_ctrl_c() -> Iterator[None]:
    """Ignore SIGINT, as a child of a worker does: only its parent handles Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


BASE_EXCEPTIONS = [asyncio.CancelledError(), GeneratorExit(), SystemExit(1), KeyboardInterrupt()]


@pytest.mark.usefixtures("ignoring_ctrl_c")
@pytest.mark.parametrize("transactional", [True, False])
@pytest.mark.parametrize("error", BASE_EXCEPTIONS, ids=repr)
def test_a_base_exception_raised_by_the_handler_itself_is_a_failure(error: BaseException, transactional: bool) -> None:
    """Otherwise the task would be released without being charged, and end a process, again and again."""

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


@pytest.mark.usefixtures("worker_stops")
def test_a_worker_that_stops_in_a_non_transactional_handler_releases_the_rest() -> None:
    def stop(each: Task) -> None:
        if each.payload == 1:
            raise SystemExit

    with handled("test.stop", stop, transactional=False):
        ids = submitted(3, "test.stop", lambda n: n)
        with pytest.raises(SystemExit):
            delivered(ids)
    assert rows() == [("SUCCEEDED", 0), ("QUEUED", 0), ("QUEUED", 0)]
    assert leases() == 0


@pytest.mark.usefixtures("worker_stops")
@pytest.mark.parametrize("transactional", [True, False])
def test_a_handler_whose_cleanup_fails_does_not_prevent_its_worker_from_stopping(transactional: bool) -> None:
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


@pytest.mark.usefixtures("worker_stops")
def test_a_verdict_that_a_handler_raises_while_its_worker_stops_is_settled() -> None:
    def snooze(_task: Task, _db: Any) -> None:
        try:
            raise SystemExit
        finally:
            raise Snooze(60)

    delivered(scripted(snooze))
    assert rows() == [("RETRYING", 0)]


def test_a_worker_that_runs_handlers_in_its_main_process_releases_its_tasks_when_it_stops() -> None:
    ids = inserting({1: raising(WorkerTerminate(1))}, 3)
    with pytest.raises(WorkerTerminate):
        delivered(ids)
    assert (rows(), leases()) == ([("QUEUED", 0)] * 3, 0)


@pytest.mark.parametrize("error", [None, SystemExit(0), OnPurpose()], ids=repr)
@pytest.mark.parametrize("transactional", [True, False])
def test_a_process_that_a_handler_forks_ends_with_the_handler_and_settles_nothing(
    error: BaseException | None, transactional: bool
) -> None:
    exit_codes: list[int] = []
    parent = os.getpid()

    def outside(_task: Task) -> None:
        if (child := os.fork()) == 0:
            if error:
                raise error
            return
        exit_codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    def inside(each: Task, _db: Any) -> None:
        outside(each)

    with handled("test.fork", inside if transactional else outside, transactional=transactional):
        try:
            delivered(submitted(1, "test.fork"))
        finally:
            if os.getpid() != parent:
                os._exit(99)
    assert exit_codes == [int(isinstance(error, OnPurpose))]
    assert (rows(), leases()) == ([("SUCCEEDED", 0)], 0)
