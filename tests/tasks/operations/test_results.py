"""A program follows its tasks without holding connections, and changes only tasks that may be changed."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy.orm import Session

import tasks
from models.engine import engine
from models.errors import Unreachable
from settings import ROOT
from tasks.core.task import Task
from tasks.execution.heartbeat import heartbeat
from tasks.operations import results
from tests.servers import wait_until
from tests.tasks.deliveries import audits, claimed, delivered, handled, leases, raising, scalar, scripted, submitted
from tests.tasks.work import OnPurpose, effects, insert, task, transitions, wakeups

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'celeriac-wait%'"


@pytest.fixture(autouse=True)
def _thread_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the waiting thread and its connection with the test."""
    monkeypatch.setattr(results, "IDLE_SECONDS", 0.05)
    yield
    wait_until(lambda: "wait-for-tasks" not in {each.name for each in threading.enumerate()}, "the thread has ended")


def test_a_task_is_read_with_its_result_or_its_error() -> None:
    good, bad = *scripted(lambda *_: {"sum": 3}), *scripted(raising(OnPurpose("no")), max_attempts=1)
    waiting = tasks.get(good)
    assert (waiting.status, waiting.result, waiting.finished_at, waiting.is_final) == ("QUEUED", None, None, False)
    delivered([good])
    delivered([bad])
    found, failed = tasks.get(str(good)), tasks.get(bad)
    assert (found.id, found.type, found.status, found.result) == (good, "test.scripted", "SUCCEEDED", {"sum": 3})
    assert (found.finished_at is not None, found.is_final, found.error_code) == (True, True, None)
    assert (failed.status, failed.error_code, failed.error_message) == ("DEAD", "handler_error", "OnPurpose: no")
    assert (failed.attempt_count, failed.max_attempts) == (1, 1)


@pytest.mark.parametrize("id_", [uuid.UUID(int=7), str(uuid.UUID(int=7)), "no id at all"])
def test_an_unknown_task_is_an_error_at_once(id_: uuid.UUID | str) -> None:
    for function in (tasks.get, tasks.wait, tasks.cancel, tasks.requeue):
        with pytest.raises(tasks.UnknownTask) as raised:
            function(id_)
        assert raised.value.code == "unknown_task"


def test_waiting_ends_when_the_task_is_final() -> None:
    (id_,) = scripted(lambda *_: 7)
    timer = threading.Timer(0.2, delivered, [[id_]])
    timer.start()
    assert tasks.wait(id_, timeout=30).result == 7
    timer.join()
    assert tasks.wait(id_).status == "SUCCEEDED"


def test_waiting_for_too_long_is_an_error_with_a_code_and_does_not_change_the_task() -> None:
    (id_,) = submitted()
    with pytest.raises(TimeoutError, match=f"The task {id_} was not final after 0.1 s") as raised:
        tasks.wait(id_, timeout=0.1)
    assert isinstance(raised.value, tasks.WaitTimeout)
    assert (raised.value.code, task(id_)["status"]) == ("wait_timeout", "QUEUED")


def test_the_ledger_is_asked_at_least_once_also_with_a_timeout_of_zero() -> None:
    (done,), (waiting,) = scripted(lambda *_: 7), submitted()
    delivered([done])
    assert tasks.wait(done, timeout=0).result == 7
    assert tasks.wait(done, timeout=math.inf).result == 7
    with pytest.raises(tasks.WaitTimeout):
        tasks.wait(waiting, timeout=0)
    with pytest.raises(tasks.UnknownTask):
        tasks.wait(uuid.UUID(int=7), timeout=0)


def test_an_event_loop_waits_in_a_thread_and_goes_on_meanwhile() -> None:
    (id_,) = scripted(lambda *_: 7)

    async def run_while_waiting() -> tasks.TaskResult:
        waiting = asyncio.create_task(asyncio.to_thread(tasks.wait, id_, timeout=60))
        await asyncio.to_thread(delivered, [id_])
        return await waiting

    assert asyncio.run(run_while_waiting()).result == 7


@pytest.mark.guarantee
def test_many_threads_that_wait_share_one_connection() -> None:
    ids = submitted(60)
    with ThreadPoolExecutor(60) as threads:
        waiting = [threads.submit(tasks.wait, id_, timeout=60) for id_ in ids]
        wait_until(lambda: len(results._final_tasks()._waiters) == 60, "all threads wait")
        wait_until(lambda: scalar(WAITING) > 0, "the poller is connected")
        assert engine().pool.checkedout() == 0  # type: ignore[attr-defined]
        assert scalar(WAITING) == 1
        assert not any(each.done() for each in waiting)
        delivered(ids)
        assert {each.result().status for each in waiting} == {"SUCCEEDED"}
        assert [each.result().id for each in waiting] == ids


def test_threads_that_wait_for_the_same_task_all_get_it() -> None:
    (id_,) = submitted()
    with ThreadPoolExecutor(5) as threads:
        waiting = [threads.submit(tasks.wait, id_, timeout=60) for _ in range(5)]
        delivered([id_])
        assert {each.result().id for each in waiting} == {id_}


def test_waiting_survives_an_unreadable_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    (id_,) = submitted()
    delivered([id_])
    failures = iter(["the first time"])
    read = results._read

    def fail_once(*given: object, **how: bool) -> object:
        if next(failures, None):
            raise Unreachable("no answer")
        return read(*given, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(results, "_read", fail_once)
    assert tasks.wait(id_, timeout=30).status == "SUCCEEDED"


@pytest.mark.parametrize("status", ["QUEUED", "RETRYING"])
def test_a_waiting_task_that_is_cancelled_never_runs(status: str) -> None:
    (id_,) = scripted(raising(OnPurpose("no")))
    if status == "RETRYING":
        delivered([id_])
    assert tasks.cancel(id_, reason="ordered twice") == status
    delivered([id_])
    assert task(id_)["status"] == "DISCARDED"
    assert transitions(id_, "to_status, message")[-1] == ("DISCARDED", "ordered twice")


def test_a_task_is_cancelled_once() -> None:
    (id_,) = submitted()
    tasks.cancel(id_, reason="the first time")
    with pytest.raises(tasks.AlreadyDone, match="is DISCARDED already"):
        tasks.cancel(id_, reason="the second time")
    assert transitions(id_, "to_status, message")[-1] == ("DISCARDED", "the first time")


def test_a_final_task_cannot_be_cancelled_and_a_live_one_not_requeued() -> None:
    done, dead, live = *submitted(), *scripted(raising(OnPurpose("no")), max_attempts=1), *submitted()
    delivered([done])
    delivered([dead])
    for id_ in (done, dead):
        with pytest.raises(tasks.AlreadyDone):
            tasks.cancel(id_)
    for id_ in (done, live):
        with pytest.raises(tasks.NotDead, match="not DEAD"):
            tasks.requeue(id_)


def test_a_requeued_task_runs_again_with_all_its_attempts() -> None:
    (id_,) = scripted(raising(OnPurpose("no")), max_attempts=1)
    delivered([id_])
    last = max(wakeup.id for wakeup in wakeups())
    tasks.requeue(id_, reason="repaired")
    found = tasks.get(id_)
    assert (found.status, found.attempt_count) == ("QUEUED", 0)
    assert transitions(id_, "to_status, message")[-1] == ("QUEUED", "repaired")
    assert [wakeup.ids for wakeup in wakeups(f"id > {last}")] == [[id_]]


def test_cancelling_a_running_task_takes_it_away_from_its_worker() -> None:
    (id_,) = submitted()
    claimed([id_])
    assert tasks.cancel(id_) == "RUNNING"
    assert task(id_)["status"] == "DISCARDED"


@pytest.mark.parametrize("count", [1, 3])
def test_cancelling_interrupts_a_transactional_handler_and_rolls_its_writes_back(count: int) -> None:
    """The rest of its batch runs again."""
    interrupted: list[str] = []

    def wait_for_ever(each: Task, db: Session) -> None:
        insert(each, db)
        if each.payload == 0 and not interrupted:
            tasks.cancel(each.id)
            try:
                while True:
                    time.sleep(0.01)
                    heartbeat().watch()  # its own thread does so every second
            except tasks.LeaseLost:
                interrupted.append("interrupted")
                raise

    with handled("test.waits", wait_for_ever):
        ids = submitted(count, "test.waits", lambda n: n)
        delivered(ids)
    assert interrupted == ["interrupted"]
    assert [task(id_)["status"] for id_ in ids] == ["DISCARDED"] + ["SUCCEEDED"] * (count - 1)
    assert effects() == dict.fromkeys(ids[1:], 1)
    assert audits() == [(ids[0], "lease_lost")]
    assert leases() == 0


def test_importing_the_package_does_not_load_what_only_results_need() -> None:
    program = "import sys, tasks; print('tasks.operations' in sys.modules); tasks.get; print('get' in tasks.__all__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
