"""Async handlers that are interrupted at bad moments, or that do not let themselves be interrupted."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
import uuid
from typing import Any

import pytest

import tasks
from models.engine import engine
from models.sql import sql
from tasks import Finish
from tasks.core.task import Task
from tasks.execution import deliver as deliver_module
from tasks.execution import hard_limits, run_async
from tasks.execution.claim import Claim
from tasks.execution.deliver import deliver
from tasks.execution.worker_end import WorkerEnd, use_worker_end
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import audits, change, claimed, delivered, handled, leases, scalar, submitted
from tests.tasks.lost_workers import reclaim_lost, start_child
from tests.tasks.work import OnPurpose, rows, task, transitions

TYPE = "test.async"
PATIENCE_SECONDS = 20.0
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def of_type(columns: str = "status, attempt_count") -> list[tuple[Any, ...]]:
    return rows(columns, "type = :type", type=TYPE)


def test_tasks_that_were_just_claimed_for_free_places_are_released_when_the_worker_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claim_more = deliver_module._claim_more

    def claim_and_stop(*arguments: Any) -> Claim | None:
        claim = claim_more(*arguments)
        if claim is not None:
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(outcome_is_sure.is_set, "the main thread stops")
        return claim

    outcome_is_sure = threading.Event()
    stop = run_async.Threads.stop

    def stop_threads(threads: run_async.Threads) -> None:
        outcome_is_sure.set()
        stop(threads)

    monkeypatch.setattr(deliver_module, "_claim_more", claim_and_stop)
    monkeypatch.setattr(run_async.Threads, "stop", stop_threads)
    others: list[uuid.UUID] = []

    async def do(each: Task) -> None:
        if each.payload == "first":
            others.extend(await asyncio.to_thread(submitted, 2, TYPE))
        await asyncio.sleep(PATIENCE_SECONDS)

    with handled(TYPE, do, concurrency=3), pytest.raises(KeyboardInterrupt):
        delivered(submitted(1, TYPE, "first"))
    assert [transitions(id_)[-1] for id_ in others] == [("RUNNING", "QUEUED")] * 2
    assert of_type() == [("QUEUED", 0)] * 3
    assert leases() == 0


def test_an_error_while_a_handler_cleans_up_for_a_stopping_worker_is_not_charged() -> None:
    async def do(each: Task) -> None:
        if each.payload == 0:
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(PATIENCE_SECONDS)
        finally:
            if each.payload == 1:
                raise OnPurpose("the connection is closed already")
            await each.step("too late", lambda: None)

    with handled(TYPE, do), pytest.raises(KeyboardInterrupt):
        delivered(submitted(3, TYPE, lambda n: n))
    assert of_type() == [("QUEUED", 0)] * 3


def test_a_worker_that_is_about_to_end_claims_no_more_tasks() -> None:
    end = WorkerEnd()
    ran: list[int] = []

    async def do(each: Task) -> None:
        ran.append(each.payload)
        if each.payload == 1:
            end.begin()

    use_worker_end(end)
    try:
        with handled(TYPE, do, concurrency=1):
            delivered(submitted(4, TYPE, lambda n: n)[:1])
    finally:
        use_worker_end(None)
    assert ran == [0, 1]
    assert of_type("status") == [("SUCCEEDED",), ("SUCCEEDED",), ("QUEUED",), ("QUEUED",)]


def test_a_handler_that_catches_the_cancellation_of_its_soft_limit_decides_itself() -> None:
    async def do(_task: Task) -> str:
        try:
            await asyncio.sleep(PATIENCE_SECONDS)
        except asyncio.CancelledError:
            return "all that was ready in time"
        return "not reached"

    with handled(TYPE, do, soft_limit_seconds=0.1):
        delivered(submitted(1, TYPE))
    assert of_type("status, result") == [("SUCCEEDED", "all that was ready in time")]


def test_a_cancelled_task_whose_handler_goes_on_is_interrupted_again_and_stays_discarded() -> None:
    interrupted: list[int] = []

    async def do(each: Task) -> str:
        await asyncio.to_thread(tasks.cancel, each.id)
        for attempt in range(2):
            try:
                await asyncio.sleep(PATIENCE_SECONDS)
            except asyncio.CancelledError:
                interrupted.append(attempt)
        return "not wanted any more"

    with handled(TYPE, do):
        ids = submitted(1, TYPE)
        delivered(ids)
    assert interrupted == [0, 1]
    assert of_type("status, result") == [("DISCARDED", None)]
    assert audits() == [(ids[0], "late_success")]
    assert leases() == 0


def test_tasks_of_asyncio_that_a_handler_leaves_behind_go_on_only_while_handlers_run() -> None:
    started: list[asyncio.Task[None]] = []
    ticks: list[float] = []

    async def left_behind() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.001)

    async def do(each: Task) -> None:
        if each.payload == "leave":
            started.append(asyncio.create_task(left_behind()))
            return
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(ticks) == before:
                await asyncio.sleep(0.001)
        started[0].cancel()

    with handled(TYPE, do):
        delivered(submitted(1, TYPE, "leave"))
        before = len(ticks)
        time.sleep(0.05)
        assert len(ticks) == before
        delivered(submitted(1, TYPE, "wait"))
    assert of_type() == [("SUCCEEDED", 0)] * 2


def test_a_soft_limit_that_strikes_while_the_result_of_a_step_is_stored_loses_neither(no_refill: None) -> None:
    """The statement goes on in its thread. It waits for a row that another transaction holds, and so does settling."""
    called: list[int] = []
    blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted"

    with engine().connect() as another:

        def hold_the_row(task_id: uuid.UUID) -> str:
            called.append(len(called))
            another.execute(sql("SELECT FROM ledger.ingest_task WHERE id = :id FOR UPDATE"), {"id": task_id})
            return "stored"

        def let_go() -> None:
            try:
                wait_until(lambda: scalar(blocked) >= 2, "the step and settling wait for the row")
            finally:
                another.rollback()

        async def do(each: Task) -> Any:
            return await each.step("one", hold_the_row, each.id)

        releasing = threading.Thread(target=let_go)
        releasing.start()
        with handled(TYPE, do, soft_limit_seconds=1, backoff=[0]):
            ids = submitted(1, TYPE)
            delivered(ids)
            releasing.join()
            assert of_type("status, attempt_count, error_code") == [("RETRYING", 1, "timeout")]
            delivered(ids)
    assert of_type("status, attempt_count, result") == [("SUCCEEDED", 1, "stored")]
    assert called == [0]
    assert leases() == 0


def test_the_write_of_a_finish_does_not_end_the_hard_limit_of_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's main process reads it, and kills a process whose handler lets no other thread run."""
    monkeypatch.setattr(hard_limits, "_own", [])
    monkeypatch.setattr(hard_limits, "GRACE_SECONDS", -math.inf)  # every limit that is noted counts as overdue
    limits = hard_limits.HardLimits()
    limits.use_slot(0)
    ids: list[uuid.UUID] = []

    async def do(each: Task) -> Finish | None:
        if each.payload == 0:
            return Finish(lambda _db: None)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (await asyncio.to_thread(task, ids[0]))["status"] != "SUCCEEDED" or not limits.overdue({os.getpid()}):
            assert time.monotonic() < deadline, "its hard limit is not noted any more"
            await asyncio.sleep(0.01)
        return None

    with handled(TYPE, do):
        ids += submitted(2, TYPE, lambda n: n)
        delivered(ids)
    assert of_type() == [("SUCCEEDED", 0)] * 2
    assert limits.overdue({os.getpid()}) == []


@pytest.mark.guarantee
def test_a_handler_that_ignores_its_cancellation_is_charged_only_after_its_process_was_killed_with_it_alone(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its neighbour starts between the soft and the hard limit, and is not charged at all."""
    monkeypatch.setattr(run_async, "LONGEST_LOOK_SECONDS", 0.05)

    async def do(each: Task) -> str:
        while each.payload == "stubborn":
            try:
                await asyncio.sleep(PATIENCE_SECONDS)
            except asyncio.CancelledError:
                if not each.isolated:
                    await asyncio.to_thread(change, neighbour, "next_retry_at = ledger.ledger_now()")
        if not each.isolated:
            await asyncio.sleep(PATIENCE_SECONDS)
        return "done"

    with handled(TYPE, do, soft_limit_seconds=0.5, hard_limit_seconds=0.9):
        stubborn, neighbour = submitted(2, TYPE, ["stubborn", "neighbour"].__getitem__, max_attempts=1)
        change(neighbour, "next_retry_at = ledger.ledger_now() + interval '1 hour'")
        _run_until_killed(stubborn)
        assert transitions(neighbour)[-1] == ("QUEUED", "RUNNING")
        reclaim_lost(ledger)
        assert of_type("status, attempt_count, isolated") == [("RETRYING", 0, True)] * 2
        delivered([neighbour])
        _run_until_killed(stubborn)
        assert reclaim_lost(ledger).charged == 1
    assert of_type("status, attempt_count, error_code") == [("DEAD", 1, "timeout"), ("SUCCEEDED", 0, None)]


def _run_until_killed(task_id: uuid.UUID) -> None:
    _, status = os.waitpid(start_child(lambda: deliver(engine(), [task_id])), 0)
    assert os.WIFSIGNALED(status)


def test_only_an_isolated_task_is_charged_by_a_process_that_does_not_know_its_type(ledger: ServersOfTests) -> None:
    """A tick may run in a process without handlers. The type may be async, so the culprit may be another task."""
    with handled(TYPE, lambda _task: None, transactional=False):
        ids = submitted(1, TYPE)
        claimed(ids)
    reclaim_lost(ledger)
    assert of_type("status, attempt_count, isolated") == [("RETRYING", 0, True)]
    with handled(TYPE, lambda _task: None, transactional=False):
        claimed(ids)
    reclaim_lost(ledger)
    assert of_type("status, attempt_count, error_code") == [("RETRYING", 1, "worker_lost")]
