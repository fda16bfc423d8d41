"""How async handlers end: a blocked loop, a worker that stops, signals, and a thousand tasks of all kinds."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import uuid
from collections import Counter
from typing import Any

import pytest
from celery import signals

import metrics
import settings
from models.engine import engine, make_engine
from models.errors import Unreachable
from models.ledger_outage import outage
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import Permanent
from tasks.core.task import Task
from tasks.execution import deliver as deliver_module
from tasks.execution import run_async
from tasks.execution import settle as settle_module
from tasks.execution.heartbeat import heartbeat
from tasks.execution.settle import STOP_SECONDS
from tests.tasks.deliveries import (
    audits,
    change,
    delivered,
    handled,
    leases,
    scalar,
    submitted,
)
from tests.tasks.work import OnPurpose, rows, transitions

TYPE = "test.async"
PATIENCE_SECONDS = 20.0
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def of_type(columns: str = "status, attempt_count") -> list[tuple[Any, ...]]:
    return rows(columns, "type = :type", type=TYPE)


def test_a_handler_that_blocks_the_loop_is_reported_and_its_neighbours_keep_leases_and_soft_limits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INGEST_LEASE_SECONDS", "1")
    settings.current.cache_clear()
    blocked = metrics.LOOP_BLOCKED_TOTAL
    before = blocked._value.get()

    async def do(each: Task) -> None:
        if each.payload == 0:
            await asyncio.sleep(0.05)
            time.sleep(2)
        else:
            for _ in range(2):  # the loop is blocked during the first one, for longer than the soft limit
                await asyncio.sleep(0.1)

    with handled(TYPE, do, soft_limit_seconds=1):
        ids = submitted(3, TYPE, lambda n: n)
        delivered(ids)
    assert of_type() == [("SUCCEEDED", 0)] * 3
    assert blocked._value.get() == before + 1
    (line,) = [record for record in caplog.records if getattr(record, "event", "") == "loop_blocked"]
    assert str(ids[0]) in line.getMessage()
    assert (line.__dict__["taskId"], line.__dict__["traceId"]) == (str(ids[0]), ids[0].hex)
    assert audits() == []


def test_a_worker_that_stops_releases_running_tasks_and_keeps_outcomes_of_ended_ones() -> None:
    cleaned_up: list[int] = []

    async def do(each: Task) -> str:
        if each.payload == 0:
            return "ended"
        if each.payload == 1:
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(PATIENCE_SECONDS)
        try:
            await asyncio.sleep(PATIENCE_SECONDS)
        finally:
            cleaned_up.append(each.payload)
        return "not reached"

    with handled(TYPE, do):
        ids = submitted(4, TYPE, lambda n: n)
        with pytest.raises(KeyboardInterrupt):
            delivered(ids)
    assert of_type("status, attempt_count, result") == [
        ("SUCCEEDED", 0, "ended"), ("QUEUED", 0, None), ("QUEUED", 0, None), ("QUEUED", 0, None)
    ]  # fmt: skip
    assert cleaned_up == [2, 3]
    assert leases() == 0
    assert heartbeat().held() == []


def test_the_event_loop_stays_the_same_between_messages() -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def do(_task: Task) -> None:
        loops.append(asyncio.get_running_loop())

    with handled(TYPE, do):
        for _ in range(2):
            delivered(submitted(1, TYPE))
    assert loops[0] is loops[1]


def test_a_thousand_tasks_with_failures_timeouts_and_lost_leases_are_settled_once_each(no_refill: None) -> None:
    ran: Counter[uuid.UUID] = Counter()

    async def do(each: Task) -> int:
        ran[each.id] += 1
        await asyncio.sleep(0.001 * (each.payload % 7))
        match each.payload % 100:
            case 1:
                raise OnPurpose
            case 2:
                await asyncio.sleep(PATIENCE_SECONDS)
            case 3:
                raise asyncio.CancelledError
        return int(each.payload)

    with handled(TYPE, do, concurrency=1000, soft_limit_seconds=1):
        ids = submitted(1000, TYPE, lambda n: n)
        for id_ in ids[4::100]:
            change(id_, "status = 'RUNNING', lease_token = gen_random_uuid()")  # of another worker
        delivered(ids)
    found = Counter(of_type("status, error_code"))
    assert found == {
        ("SUCCEEDED", None): 960, ("RETRYING", "handler_error"): 20, ("RETRYING", "timeout"): 10, ("RUNNING", None): 10
    }  # fmt: skip
    assert Counter(ran.values()) == {1: 990}
    assert leases() == 0
    assert all(len(transitions(id_)) == 3 for id_ in ids[::50])


def test_a_receiver_that_raises_harms_no_async_task() -> None:
    def fail(**_: Any) -> None:
        raise OnPurpose("a receiver")

    async def do(_task: Task) -> None: ...

    around = (signals.task_prerun, signals.task_postrun, signals.task_success)
    for signal_ in around:
        signal_.connect(fail, weak=False)
    try:
        with handled(TYPE, do):
            delivered(submitted(3, TYPE))
    finally:
        for signal_ in around:
            signal_.disconnect(fail)
    assert of_type() == [("SUCCEEDED", 0)] * 3


def test_a_thousand_tasks_at_once_share_a_pool_of_one_connection() -> None:
    all_are_here = asyncio.Barrier(1000)

    async def do(each: Task) -> Any:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await all_are_here.wait()
        return await each.step("one", lambda: each.payload)

    with handled(TYPE, do, concurrency=1000):
        ids = submitted(1000, TYPE, lambda n: n)
        assert after_commit_publisher().wait_until_idle(20)
        small = make_engine(settings.current().database_url, pool_size=1, max_overflow=0, pool_timeout=5)
        try:
            deliver_module.deliver(small, ids)
            assert small.pool.checkedout() == 0  # type: ignore[attr-defined]
        finally:
            small.dispose()
    assert of_type("status, result") == [("SUCCEEDED", n) for n in range(1000)]
    assert not outage.is_on


def test_max_running_holds_for_an_async_handler_whose_tasks_run_at_once() -> None:
    at_once = [0, 0]  # now, and at most
    both_are_here = asyncio.Barrier(2)

    async def do(_task: Task) -> None:
        at_once[0] += 1
        at_once[1] = max(at_once)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await both_are_here.wait()
        at_once[0] -= 1

    with handled(TYPE, do, concurrency=10, max_running=2):
        ids = submitted(6, TYPE)
        for _ in range(3):
            delivered(ids)
    assert of_type() == [("SUCCEEDED", 0)] * 6
    assert at_once == [0, 2]


def test_a_paused_queue_gives_no_more_tasks() -> None:
    ran: list[int] = []

    async def do(each: Task) -> None:
        if each.payload == 0:
            with engine().begin() as connection:
                connection.execute(
                    sql("INSERT INTO ledger.queue_pause (queue, intake, actor, reason, created_at)"
                        " VALUES ('ingest', false, 'a test', '', ledger.ledger_now())")
                )  # fmt: skip
        ran.append(each.payload)

    with handled(TYPE, do, concurrency=1):
        ids = submitted(3, TYPE, lambda n: n)
        delivered(ids[:1])
    assert ran == [0]
    assert scalar("SELECT count(*) FROM ledger.ingest_task WHERE status = 'QUEUED'") == 2


def test_a_worker_that_stops_while_the_ledger_is_unreachable_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It leaves its tasks to reclaim after a few seconds, not once for each claim: Celery would kill it otherwise."""
    monkeypatch.setattr(run_async, "LONGEST_LOOK_SECONDS", 0.05)
    is_unreachable = threading.Event()
    started: list[int] = []
    stopped_at: list[float] = []
    settle_in = settle_module.settle_in

    def fail_to_settle(*arguments: Any, **options: Any) -> Any:
        if is_unreachable.is_set():
            raise Unreachable
        return settle_in(*arguments, **options)

    monkeypatch.setattr(settle_module, "settle_in", fail_to_settle)

    async def do(each: Task) -> None:
        started.append(each.payload)
        if each.payload == 0:
            for number in range(1, 5):  # each has a claim of its own
                await asyncio.to_thread(submitted, 1, TYPE, number)
                while number not in started:
                    await asyncio.sleep(0.01)
            is_unreachable.set()
            return
        while each.payload != 1 or not outage.is_on:
            await asyncio.sleep(0.01)
        stopped_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with handled(TYPE, do), pytest.raises(KeyboardInterrupt):
        delivered(submitted(1, TYPE, 0))
    assert time.monotonic() - stopped_at[0] < 2.5 * STOP_SECONDS
    outage.note_answer()
    assert of_type("status") == [("RUNNING",)] * 5
    assert leases() == 5


def test_celery_signals_are_sent_once_per_attempt(no_refill: None) -> None:
    sent: list[tuple[str, str]] = []
    on_the_loop: dict[str, bool] = {}
    names = ("task_prerun", "task_success", "task_retry", "task_failure", "task_postrun")

    def receiver_of(name: str) -> Any:
        def receive(sender: Any, task_id: str, **_: Any) -> None:
            assert sender.name == TYPE
            sent.append((name, task_id))
            on_the_loop[name] = threading.current_thread() is threading.main_thread()

        return receive

    receivers = {name: receiver_of(name) for name in names}
    for name, receive in receivers.items():
        getattr(signals, name).connect(receive, weak=False)

    async def do(each: Task) -> None:
        if each.payload == 1:
            raise OnPurpose
        if each.payload == 2:
            raise Permanent("never")

    try:
        with handled(TYPE, do):
            ids = [str(id_) for id_ in submitted(3, TYPE, lambda n: n)]
            delivered(ids)
    finally:
        for name, receive in receivers.items():
            getattr(signals, name).disconnect(receive)
    ends = zip(("task_success", "task_retry", "task_failure"), ids, strict=True)
    around = [(name, id_) for id_ in ids for name in ("task_prerun", "task_postrun")]
    assert Counter(sent) == Counter([*ends, *around])
    assert {name for name, is_on_it in on_the_loop.items() if is_on_it} == {"task_prerun", "task_postrun"}
