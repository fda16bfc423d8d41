"""Async handlers: many tasks at once in one event loop, each settled once, whatever ends them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from models.engine import engine
from models.sql import sql
from tasks import Discard, Finish, LeaseLost, Permanent, Snooze
from tasks.core.task import Task
from tasks.execution import due_tasks
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import (
    at_commit,
    audits,
    change,
    claimed,
    counted,
    delivered,
    handled,
    leases,
    submitted,
    take_away,
    watching,
)
from tests.tasks.lost_workers import reclaim_lost
from tests.tasks.work import OnPurpose, effects, insert, rows, task

TYPE = "test.async"
PATIENCE_SECONDS = 20.0
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def of_type(columns: str = "status, attempt_count") -> list[tuple[Any, ...]]:
    return rows(columns, "type = :type", type=TYPE)


def test_all_tasks_of_a_claim_run_at_the_same_time_in_one_thread() -> None:
    threads: set[int] = set()
    all_are_here = asyncio.Barrier(50)

    async def meet(each: Task) -> int:
        threads.add(threading.get_ident())
        async with asyncio.timeout(PATIENCE_SECONDS):
            await all_are_here.wait()
        return int(each.payload)

    commits: list[Connection] = []
    with handled(TYPE, meet, concurrency=50):
        ids = submitted(50, TYPE, lambda n: n)
        with at_commit(engine(), commits.append):
            delivered(ids)
    assert len(commits) < 10, "tasks that end together are settled together"
    assert of_type("status, attempt_count, result") == [("SUCCEEDED", 0, n) for n in range(50)]
    assert threads == {threading.get_ident()}
    assert leases() == 0
    assert counted() == {"succeeded": 50}


def test_each_task_has_its_own_outcome(no_refill: None) -> None:
    async def do(each: Task) -> Any:
        await asyncio.sleep(0)
        match each.payload:
            case "fail":
                raise OnPurpose
            case "snooze":
                raise Snooze(60)
            case "discard":
                return Discard("no longer needed")
            case "permanent":
                raise Permanent("never")
            case "cancelled":
                raise asyncio.CancelledError
            case "own timeout":
                raise TimeoutError("of the server")
            case "exit":
                raise SystemExit(3)
            case "bad result":
                return object()
        return "done"

    payloads = ["ok", "fail", "snooze", "discard", "permanent", "cancelled", "own timeout", "exit", "bad result", "ok"]
    with handled(TYPE, do, concurrency=20):
        delivered(submitted(len(payloads), TYPE, payloads.__getitem__))
    assert of_type("status, attempt_count, error_code") == [
        ("SUCCEEDED", 0, None), ("RETRYING", 1, "handler_error"), ("RETRYING", 0, None), ("DISCARDED", 0, None),
        ("DEAD", 1, "permanent"), ("RETRYING", 1, "handler_error"), ("RETRYING", 1, "handler_error"),
        ("RETRYING", 1, "handler_error"), ("RETRYING", 1, "bad_result"), ("SUCCEEDED", 0, None),
    ]  # fmt: skip
    assert leases() == 0


def test_a_soft_limit_cancels_its_own_task_only(no_refill: None) -> None:
    cleaned_up: list[str] = []

    async def wait(each: Task) -> None:
        try:
            await asyncio.sleep(PATIENCE_SECONDS if each.payload == "slow" else 0.3)
        finally:
            cleaned_up.append(each.payload)

    with handled(TYPE, wait, concurrency=3, soft_limit_seconds=0.2, hard_limit_seconds=60):
        delivered(submitted(1, TYPE, "slow"))
    assert of_type("status, attempt_count, error_code") == [("RETRYING", 1, "timeout")]
    assert "soft limit of 0.2 s" in of_type("error_message")[0][0]
    assert cleaned_up == ["slow"]


def test_a_free_place_is_given_to_the_next_task_while_a_slow_one_runs() -> None:
    quick: list[int] = []
    enough = threading.Event()

    async def do(each: Task) -> None:
        if each.payload == 0:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not enough.is_set():
                assert time.monotonic() < deadline, f"only {quick} ran beside the slow task"
                await asyncio.sleep(0.01)
            return
        quick.append(each.payload)
        if len(quick) == 9:
            enough.set()

    with handled(TYPE, do, concurrency=2):
        ids = submitted(10, TYPE, lambda n: n)
        delivered(ids[:1])  # one wake-up

    assert of_type() == [("SUCCEEDED", 0)] * 10
    assert sorted(quick) == list(range(1, 10))
    assert leases() == 0


def test_a_free_place_is_given_to_the_next_task_that_no_other_transaction_holds() -> None:
    ran: list[int] = []

    async def do(each: Task) -> None:
        ran.append(each.payload)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while each.payload == 0 and len(ran) < 3:
            assert time.monotonic() < deadline, "the task behind the locked ones did not run"
            await asyncio.sleep(0.01)

    with handled(TYPE, do, concurrency=2), engine().connect() as another:
        ids = submitted(5, TYPE, lambda n: n)
        another.execute(sql("SELECT FROM ledger.ingest_task WHERE id = ANY(:ids) FOR UPDATE"), {"ids": ids[1:3]})
        delivered(ids[:1])
    assert sorted(ran) == [0, 3, 4]
    assert of_type("status") == [("SUCCEEDED",), ("QUEUED",), ("QUEUED",), ("SUCCEEDED",), ("SUCCEEDED",)]


def test_tasks_of_the_message_that_took_a_free_place_are_not_delivered_again() -> None:
    at_once = [0, 0]  # now, and at most

    async def do(_task: Task) -> None:
        at_once[0] += 1
        at_once[1] = max(at_once)
        await asyncio.sleep(0)
        at_once[0] -= 1

    with handled(TYPE, do, concurrency=2):
        delivered(submitted(20, TYPE))
    assert of_type() == [("SUCCEEDED", 0)] * 20
    assert counted() == {"succeeded": 20}
    assert at_once == [0, 2]


def test_no_more_tasks_are_claimed_while_another_type_waits_in_the_queue(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_tasks, "FAIR_SECONDS", 0.0)
    others = submitted(1, "test.insert")
    move(stack, 1)
    ran: list[int] = []

    async def do(each: Task) -> None:
        ran.append(each.payload)

    with handled(TYPE, do, concurrency=1):
        ids = submitted(3, TYPE, lambda n: n)
        delivered(ids[:1])
        assert len(ran) == 1
        delivered(others)
        delivered(ids[1:2])
        assert len(ran) == 3


def test_steps_take_plain_and_async_functions_and_are_remembered(no_refill: None) -> None:
    called: Counter[str] = Counter()
    threads: dict[str, int] = {}

    def plain(word: str) -> str:
        called["plain"] += 1
        threads["plain"] = threading.get_ident()
        return word

    async def waits(*, word: str) -> str:
        called["async"] += 1
        threads["async"] = threading.get_ident()
        await asyncio.sleep(0)
        return word

    async def do(each: Task) -> list[Any]:
        words = [
            await each.step("plain", plain, "a"),
            await each.step("async", waits, word="b"),
            await each.step("lambda", lambda: waits(word="c")),
        ]
        seen = [item async for item in each.resume("loop", range(3), every=1)]
        if called["try"] == 0:
            called["try"] += 1
            raise OnPurpose
        return [*words, seen]

    with handled(TYPE, do, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        delivered([id_])
        assert of_type() == [("RETRYING", 1)]
        delivered([id_])
    assert task(id_)["result"] == ["a", "b", "c", []]
    assert called == {"plain": 1, "async": 2, "try": 1}
    assert threads["async"] == threading.get_ident() != threads["plain"]


def test_a_step_whose_function_raises_stop_iteration_fails_and_does_not_hang(no_refill: None) -> None:
    async def do(each: Task) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await each.step("next", next, iter(()))

    with handled(TYPE, do):
        delivered(submitted(1, TYPE))
    assert of_type("status, error_message") == [("RETRYING", "RuntimeError: The function raised StopIteration.")]


def test_nothing_waits_for_postgresql_on_the_event_loop() -> None:
    on_the_loop: list[str] = []
    main = threading.get_ident()
    handlers_run = threading.Event()

    def note(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if handlers_run.is_set() and threading.get_ident() == main:
            on_the_loop.append(statement)

    async def do(each: Task) -> Any:
        handlers_run.set()
        await each.step("one", lambda: 1)
        if each.payload == 1:
            return Finish(lambda db: insert(each, db), "finished")
        return None

    with handled(TYPE, do, concurrency=2), watching(engine(), "before_cursor_execute", note):
        ids = submitted(6, TYPE, lambda n: n)
        delivered(ids[:2])
    assert on_the_loop == []
    assert of_type("status, result") == [("SUCCEEDED", "finished" if n == 1 else None) for n in range(6)]
    assert effects() == {ids[1]: 1}


def test_a_finish_that_fails_is_rolled_back_and_charged_to_its_task_only(no_refill: None) -> None:
    async def do(each: Task) -> Finish:
        def write(db: Session) -> None:
            insert(each, db)
            if each.payload == 1:
                raise OnPurpose

        return Finish(write)

    with handled(TYPE, do):
        ids = submitted(3, TYPE, lambda n: n)
        delivered(ids)
    assert of_type() == [("SUCCEEDED", 0), ("RETRYING", 1), ("SUCCEEDED", 0)]
    assert effects() == {ids[0]: 1, ids[2]: 1}
    assert leases() == 0


def test_a_discarded_task_is_cancelled_and_the_others_are_not() -> None:
    raised: list[BaseException] = []

    async def do(each: Task) -> str:
        if each.payload == 0:
            change(each.id, "status = 'DISCARDED', lease_token = NULL, finished_at = ledger.ledger_now()")
            try:
                await asyncio.sleep(PATIENCE_SECONDS)
            except asyncio.CancelledError as error:
                raised.append(error)
                raise
        await asyncio.sleep(0.01)
        return "done"

    with handled(TYPE, do):
        delivered(submitted(3, TYPE, lambda n: n))
    assert len(raised) == 1
    assert of_type() == [("DISCARDED", 0), ("SUCCEEDED", 0), ("SUCCEEDED", 0)]
    assert leases() == 0


def test_a_task_that_was_taken_over_is_audited_and_its_steps_refuse_to_write() -> None:
    refused: list[type] = []

    async def do(each: Task) -> None:
        if each.payload == 0:
            take_away(each.id)
            try:
                await each.step("late", lambda: 1)
            except LeaseLost as error:
                refused.append(type(error))
                raise

    with handled(TYPE, do):
        ids = submitted(2, TYPE, lambda n: n)
        delivered(ids)
    assert refused == [LeaseLost]
    assert audits() == [(ids[0], "lease_lost")]
    assert of_type("status") == [("RUNNING",), ("SUCCEEDED",)]


def test_tasks_of_one_partition_key_run_one_after_the_other_and_stop_behind_a_failure(no_refill: None) -> None:
    running: Counter[str] = Counter()
    order: list[int] = []

    async def do(each: Task) -> None:
        assert each.partition_key is not None
        running[each.partition_key] += 1
        assert running[each.partition_key] == 1, "two tasks of one key at once"
        await asyncio.sleep(0.005)
        running[each.partition_key] -= 1
        order.append(each.payload)
        if each.payload == 2:
            raise OnPurpose

    with handled(TYPE, do):
        ids = submitted(5, TYPE, lambda n: n, partition_key="a")
        delivered(ids)
    assert order == [0, 1, 2]
    assert of_type("status") == [("SUCCEEDED",), ("SUCCEEDED",), ("RETRYING",), ("QUEUED",), ("QUEUED",)]
    assert leases() == 0


def test_a_task_that_must_run_alone_has_the_event_loop_for_itself() -> None:
    at_once: list[int] = []
    now = 0

    async def do(_task: Task) -> None:
        nonlocal now
        now += 1
        await asyncio.sleep(0.05)
        at_once.append(now)
        now -= 1

    with handled(TYPE, do):
        ids = submitted(4, TYPE)
        change(ids[0], "isolated = true")
        delivered(ids[:1])
        assert at_once == [1]
        assert of_type("status")[1:] == [("QUEUED",)] * 3


def test_only_an_isolated_task_is_charged_when_its_process_is_lost(stack: ServersOfTests) -> None:
    """A process may have run others at the same time under other leases, so the culprit is unknown."""

    async def do(_task: Task) -> None: ...

    with handled(TYPE, do):
        ids = submitted(2, TYPE)
        change(ids[1], "isolated = true")
        claimed(ids[:1], batch_of=lambda _: 1)
        claimed(ids[1:])
        reclaim_lost(stack)
    assert of_type("status, attempt_count, isolated, error_code") == [
        ("RETRYING", 0, True, None), ("RETRYING", 1, True, "worker_lost")
    ]  # fmt: skip
