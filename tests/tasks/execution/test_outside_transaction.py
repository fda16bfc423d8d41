"""Handlers outside a transaction: their leases, their time limits, and their interruption when the task is lost."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import settings
from models.engine import autocommit, engine
from models.sql import sql
from tasks import Finish, LeaseLost
from tasks.core.lease import HeldLease, WatchedTask
from tasks.core.logs import JSON
from tasks.core.task import Task
from tasks.execution.deliver import deliver
from tasks.execution.heartbeat import heartbeat
from tasks.execution.time_limits import SoftLimit, SoftTimeLimit
from tasks.recovery.reclaim import Reclaimed, reclaim_leases
from tests.servers import ServersOfTests
from tests.tasks.deliveries import (
    audits,
    change,
    delivered,
    handled,
    leases,
    scalar,
    submitted,
    watching,
)
from tests.tasks.lost_workers import later, reclaim_lost, start_child
from tests.tasks.outside import TYPE, ran, state
from tests.tasks.work import OnPurpose, effects, insert, task

OPEN = """SELECT count(*) FROM pg_stat_activity
          WHERE application_name = 'celeriac' AND pid <> pg_backend_pid() AND xact_start IS NOT NULL"""
DISCARDED = "status = 'DISCARDED', lease_token = NULL, finished_at = ledger.ledger_now()"
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def wait_for_ever() -> None:
    threading.Event().wait(20)
    raise AssertionError("it was not interrupted")


def interrupt_and_wait(interrupt: Callable[[Exception], None]) -> None:
    interrupt(LeaseLost())
    wait_for_ever()


def test_no_transaction_is_open_while_the_handler_and_its_steps_run() -> None:
    counts: list[int] = []

    def count(each: Task) -> None:
        counts.append(scalar(OPEN))
        each.step("count", lambda: counts.append(scalar(OPEN)))
        for _ in each.resume("loop", range(2), every=1):
            counts.append(scalar(OPEN))

    with handled(TYPE, count, transactional=False):
        delivered(submitted(2, TYPE))
    assert counts == [0] * 8


def test_the_lease_of_a_handler_that_runs_for_three_leases_is_renewed(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGEST_LEASE_SECONDS", "1")
    settings.current.cache_clear()
    reclaimed: list[Reclaimed] = []

    def take_long(each: Task) -> None:
        until = time.monotonic() + 3.2
        while time.monotonic() < until or len(reclaimed) <= 10:
            later(ledger, 0)
            reclaimed.append(reclaim_leases(engine(), settings.current()))
            each.check_lease()
            time.sleep(0.1)

    id_ = ran(take_long)
    assert set(reclaimed) == {Reclaimed()}
    assert state(id_) == ("SUCCEEDED", 0, None)


def test_a_handler_that_exceeds_its_soft_limit_cleans_up_and_is_retried() -> None:
    cleaned_up: list[bool] = []

    def slow(_task: Task) -> None:
        try:
            wait_for_ever()
        finally:
            cleaned_up.append(True)

    id_ = ran(slow, soft_limit_seconds=0.1, permanent=[SoftTimeLimit])
    assert (state(id_), cleaned_up) == (("RETRYING", 1, "timeout"), [True])


def ignores_its_limit(_task: Task) -> None:
    while True:
        try:
            time.sleep(5)
        except Exception:
            continue


async def ignores_its_limit_on_a_loop(_task: Task) -> None:
    while True:
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            continue


def test_the_hard_limit_ends_the_process_of_a_handler_that_ignores_exceptions(ledger: ServersOfTests) -> None:
    with handled(TYPE, ignores_its_limit, transactional=False, soft_limit_seconds=0.1, hard_limit_seconds=0.3):
        ids = submitted(1, TYPE)
        _, status = os.waitpid(start_child(lambda: deliver(engine(), ids)), 0)
        assert os.WIFSIGNALED(status)
        assert reclaim_lost(ledger).charged == 1
    assert state(ids[0]) == ("RETRYING", 1, "timeout")
    assert "hard limit of 0.3 s" in task(ids[0])["error_message"]


@pytest.mark.parametrize(
    ("function", "how"),
    [(ignores_its_limit, {"transactional": False}), (ignores_its_limit_on_a_loop, {"concurrency": 1})],
)
def test_the_log_line_about_a_hard_limit_names_the_task(function: Any, how: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "log"

    def work() -> None:
        to_file = logging.FileHandler(log)
        to_file.setFormatter(JSON)
        logging.getLogger().addHandler(to_file)
        deliver(engine(), [id_])

    with handled(TYPE, function, soft_limit_seconds=0.1, hard_limit_seconds=0.3, **how):
        (id_,) = submitted(1, TYPE)
        os.waitpid(start_child(work), 0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (line,) = [line for line in lines if line.get("event") == "process_ended_at_hard_limit"]
    assert (line.get("taskId"), line.get("type"), line.get("traceId")) == (str(id_), TYPE, id_.hex)


@pytest.mark.guarantee
def test_a_discarded_task_is_interrupted_within_seconds_and_the_others_of_its_batch_are_not() -> None:
    events: list[str] = []

    def work(each: Task) -> Any:
        if each.payload != 1:
            return each.step("one", lambda: "done")
        change(each.id, DISCARDED)
        try:
            wait_for_ever()
        except LeaseLost:
            events.append("interrupted")
            raise
        finally:
            events.append("cleaned up")
        return ""

    with handled(TYPE, work, transactional=False):
        ids = submitted(4, TYPE, lambda n: n)
        started_at = time.monotonic()
        delivered(ids)
        assert time.monotonic() - started_at < 5
        assert events == ["interrupted", "cleaned up"]
        assert [state(id_)[:2] for id_ in ids] == [("SUCCEEDED", 0), ("DISCARDED", 0), ("QUEUED", 0), ("QUEUED", 0)]
        delivered(ids)  # the slow batch has left the last two to others
    assert {state(id_)[:2] for id_ in ids[2:]} == {("SUCCEEDED", 0)}
    assert (audits(), leases()) == ([(ids[1], "lease_lost")], 0)


def test_a_handler_that_ignores_its_interruption_cannot_write_at_the_end() -> None:
    def stubborn(each: Task) -> Finish:
        change(each.id, DISCARDED)
        with pytest.raises(LeaseLost):
            wait_for_ever()
        return Finish(lambda db: insert(each, db))

    id_ = ran(stubborn)
    assert (state(id_)[0], effects(), audits()) == ("DISCARDED", {}, [(id_, "late_success")])


def test_a_late_interruption_never_hits_the_next_call() -> None:
    """The heartbeat's thread may interrupt a handler that has just ended."""
    with SoftLimit(600) as limit:
        late = limit.interrupter_of_next_call()
        limit.call(lambda: None)
        assert limit.call(lambda: [late(LeaseLost()), "undisturbed"][1]) == "undisturbed"
        assert limit.call(lambda: "after it") == "after it"
        own = limit.interrupter_of_next_call()
        own(LeaseLost())  # its call has not begun
        with pytest.raises(LeaseLost):
            limit.call(interrupt_and_wait, own)


def test_an_interruption_at_the_very_end_of_a_call_hits_that_call_or_nothing() -> None:
    outcomes = {"done": 0, "interrupted": 0}
    with SoftLimit(600) as limit:
        for step in range(200):
            interrupt, ready = limit.interrupter_of_next_call(), threading.Event()

            def fire(interrupt: Any = interrupt, ready: threading.Event = ready, delay: float = step * 2e-6) -> None:
                ready.wait()
                time.sleep(delay)
                interrupt(LeaseLost())

            thread = threading.Thread(target=fire)
            thread.start()
            try:
                limit.call(lambda ready=ready: [ready.set(), sum(range(3000))])
                outcomes["done"] += 1
            except LeaseLost:
                outcomes["interrupted"] += 1
            thread.join()
            assert limit.call(lambda: "undisturbed") == "undisturbed"
    assert outcomes["done"] + outcomes["interrupted"] == 200


def test_a_task_that_is_settled_during_the_check_does_not_count_as_lost() -> None:
    """The check finds that its token is gone, because it was settled."""
    interruptions: list[Exception] = []
    with heartbeat().holding(HeldLease(uuid.uuid4(), time.monotonic() + 60)) as held:
        held.watched = WatchedTask(uuid.uuid4(), interruptions.append)

        def end(*_: Any) -> None:
            held.watched = None

        with watching(heartbeat()._connections(), "before_cursor_execute", end):
            heartbeat().watch()
        assert (held.is_good, interruptions) == (True, [])
        held.watched = WatchedTask(uuid.uuid4(), interruptions.append)
        heartbeat().watch()
        assert (held.is_good, held.is_lost, len(interruptions)) == (False, False, 1)
        held.watched = None
        assert held.is_good, "the next task of the same lease must not be lost, too"


def test_an_exception_in_the_cleanup_of_a_handler_fails_its_task_and_the_batch_continues() -> None:
    def work(each: Task) -> None:
        if each.payload == 0:
            try:
                wait_for_ever()
            finally:
                raise OnPurpose("while cleaning up")

    with handled(TYPE, work, transactional=False, soft_limit_seconds=0.1):
        ids = submitted(2, TYPE, lambda n: n)
        delivered(ids)
    assert [state(id_)[:2] for id_ in ids] == [("RETRYING", 1), ("SUCCEEDED", 0)]


def test_an_interrupted_autocommit_connection_does_not_stay_in_autocommit_mode() -> None:
    """A time limit may fire while `autocommit` resets its connection."""

    def strike(*_: Any) -> None:
        raise SoftTimeLimit(1)

    with watching(engine(), "rollback", strike), pytest.raises(SoftTimeLimit), autocommit(engine()) as connection:
        before = connection.execute(sql("SELECT pg_backend_pid()")).scalar_one()
    with engine().connect() as connection:
        assert connection.execute(sql("SELECT pg_backend_pid()")).scalar_one() == before
        connection.execute(sql("INSERT INTO public.test_sink (note) VALUES ('undone')"))
        connection.rollback()
    assert scalar("SELECT count(*) FROM public.test_sink") == 0


@pytest.mark.parametrize("how", ["error", "cut"])
def test_an_autocommit_connection_is_usable_after_a_failed_statement(how: str) -> None:
    statement = "SELECT 1 / 0" if how == "error" else "SELECT pg_terminate_backend(pg_backend_pid())"
    for _ in range(3):
        with pytest.raises(Exception, match=r"division|terminat"), autocommit(engine()) as connection:
            connection.execute(sql(statement))
        with engine().connect() as connection:
            connection.execute(sql("INSERT INTO public.test_sink (note) VALUES ('undone')"))
            connection.rollback()
    assert scalar("SELECT count(*) FROM public.test_sink") == 0


def test_a_lease_past_its_local_deadline_is_still_settled_under_its_token() -> None:
    def overrun(each: Task) -> str:
        assert each.steps is not None
        held: HeldLease = each.steps.held
        held.deadline = 0.0
        return "done"

    assert state(ran(overrun)) == ("SUCCEEDED", 0, None)
