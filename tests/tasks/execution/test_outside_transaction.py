"""Handlers outside a transaction: within their limits, interrupted when they are discarded, and alone in that."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

import settings
from models.engine import at_once, engine
from models.sql import sql
from tasks import Finish, LeaseLost
from tasks.core.lease import Held, Watched
from tasks.core.task import Task
from tasks.execution.deliver import ingest
from tasks.execution.heartbeat import heartbeat
from tasks.execution.limits import SoftLimit, SoftTimeLimit
from tasks.recovery.reclaim import Reclaimed, take_over
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
from tests.tasks.lost_workers import later, start_child, taken_over
from tests.tasks.outside import TYPE, ran, state
from tests.tasks.work import OnPurpose, effects, insert

OPEN = """SELECT count(*) FROM pg_stat_activity
          WHERE application_name = 'celeriac' AND pid <> pg_backend_pid() AND xact_start IS NOT NULL"""
DISCARDED = "status = 'DISCARDED', lease_token = NULL, finished_at = ledger.ledger_now()"
pytestmark = pytest.mark.usefixtures("ledger")


def wait_for_ever() -> None:
    threading.Event().wait(20)
    raise AssertionError("nobody interrupted it")


def interrupt_and_wait(interrupt: Callable[[Exception], None]) -> None:
    interrupt(LeaseLost())
    wait_for_ever()


def test_no_transaction_is_open_while_the_handler_runs_nor_while_it_uses_steps() -> None:
    looks: list[int] = []

    def look(each: Task) -> None:
        looks.append(scalar(OPEN))
        each.step("look", lambda: looks.append(scalar(OPEN)))
        for _ in each.resume("loop", range(2), every=1):
            looks.append(scalar(OPEN))

    with handled(TYPE, look, transactional=False):
        delivered(submitted(2, TYPE))
    assert looks == [0] * 8


def test_its_lease_is_renewed_over_three_leases_and_nobody_takes_it_over(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGEST_LEASE_SECONDS", "1")
    settings.current.cache_clear()
    looks: list[Reclaimed] = []

    def take_long(each: Task) -> None:
        until = time.monotonic() + 3.2
        while time.monotonic() < until:
            later(ledger, 0)
            looks.append(take_over(engine(), settings.current()))
            each.check_lease()
            time.sleep(0.1)

    id_ = ran(take_long)
    assert len(looks) > 10
    assert set(looks) == {Reclaimed()}
    assert state(id_) == ("SUCCEEDED", 0, None)


def test_the_soft_limit_is_a_retry_and_the_handler_cleans_up() -> None:
    cleaned: list[str] = []

    def slow(_task: Task) -> None:
        try:
            wait_for_ever()
        finally:
            cleaned.append("up")

    id_ = ran(slow, soft_limit_seconds=0.1, permanent=[SoftTimeLimit])
    assert (state(id_), cleaned) == (("RETRYING", 1, "timeout"), ["up"])


def test_the_hard_limit_ends_the_process_of_a_handler_that_heeds_nothing(ledger: ServersOfTests) -> None:
    def endless(_task: Task) -> None:
        while True:
            try:
                time.sleep(5)
            except Exception:
                continue

    with handled(TYPE, endless, transactional=False, soft_limit_seconds=0.1, hard_limit_seconds=0.3):
        ids = submitted(1, TYPE)
        _, status = os.waitpid(start_child(lambda: ingest(engine(), ids)), 0)
        assert os.WIFSIGNALED(status)
        assert taken_over(ledger).charged == 1
    assert state(ids[0]) == ("RETRYING", 1, "worker_lost")


@pytest.mark.guarantee
def test_a_discarded_task_is_interrupted_within_seconds_and_its_neighbours_are_not() -> None:
    cleaned: list[str] = []

    def work(each: Task) -> Any:
        if each.payload != 1:
            return each.step("one", lambda: "done")
        change(each.id, DISCARDED)
        try:
            wait_for_ever()
        except LeaseLost:
            cleaned.append("told")
            raise
        finally:
            cleaned.append("up")
        return ""

    started_at = time.monotonic()
    with handled(TYPE, work, transactional=False):
        ids = submitted(4, TYPE, lambda n: n)
        delivered(ids)
        assert time.monotonic() - started_at < 5
        assert cleaned == ["told", "up"]
        assert [state(id_)[:2] for id_ in ids] == [("SUCCEEDED", 0), ("DISCARDED", 0), ("QUEUED", 0), ("QUEUED", 0)]
        delivered(ids)  # those for which there was no time
    assert {state(id_)[:2] for id_ in ids[2:]} == {("SUCCEEDED", 0)}
    assert (audits(), leases()) == ([(ids[1], "lease_lost")], 0)


def test_a_handler_that_swallows_its_interruption_is_refused_at_the_end() -> None:
    def stubborn(each: Task) -> Finish:
        change(each.id, DISCARDED)
        with pytest.raises(LeaseLost):
            wait_for_ever()
        return Finish(lambda db: insert(each, db))

    id_ = ran(stubborn)
    assert (state(id_)[0], effects(), audits()) == ("DISCARDED", {}, [(id_, "late_success")])


def test_an_interruption_is_for_its_own_call_and_never_for_the_next() -> None:
    """The heartbeat's thread decided about a handler that has ended meanwhile."""
    with SoftLimit(600) as limit:
        late = limit.interrupter_of_next_call()
        limit.call(lambda: None)
        assert limit.call(lambda: [late(LeaseLost()), "undisturbed"][1]) == "undisturbed"
        assert limit.call(lambda: "after it") == "after it"
        own = limit.interrupter_of_next_call()
        own(LeaseLost())  # not begun yet
        with pytest.raises(LeaseLost):
            limit.call(interrupt_and_wait, own)


def test_interruptions_at_the_very_end_of_a_call_hit_it_or_nothing() -> None:
    outcomes = {"done": 0, "interrupted": 0}
    with SoftLimit(600) as limit:
        for step in range(200):
            shoot, ready = limit.interrupter_of_next_call(), threading.Event()

            def fire(shoot: Any = shoot, ready: threading.Event = ready, delay: float = step * 2e-6) -> None:
                ready.wait()
                time.sleep(delay)
                shoot(LeaseLost())

            thread = threading.Thread(target=fire)
            thread.start()
            try:
                limit.call(lambda ready=ready: [ready.set(), sum(range(3000))])
                outcomes["done"] += 1
            except LeaseLost:
                outcomes["interrupted"] += 1
            thread.join()
            assert limit.call(lambda: "well") == "well"
    assert outcomes["done"] + outcomes["interrupted"] == 200


def test_a_task_that_ends_while_it_is_looked_at_costs_its_lease_nothing() -> None:
    """The look finds that it is held no more, since it was settled: that is no loss."""
    told: list[Exception] = []
    with heartbeat().holding(uuid.uuid4(), time.monotonic() + 60) as held:
        held.watched = Watched(uuid.uuid4(), told.append)

        def end(*_: Any) -> None:
            held.watched = None

        with watching(heartbeat()._connections(), "before_cursor_execute", end):
            heartbeat().watch()
        assert (held.is_good, told) == (True, [])
        held.watched = Watched(uuid.uuid4(), told.append)
        heartbeat().watch()
        assert (held.is_good, held.is_lost, len(told)) == (False, False, 1)
        held.watched = None
        assert held.is_good, "the next task of the same lease is not lost with it"


def test_an_exception_in_the_finally_of_a_handler_is_its_failure_and_the_batch_goes_on() -> None:
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


def test_a_connection_whose_user_was_interrupted_does_not_commit_by_itself_for_the_next() -> None:
    """A time limit may strike while `at_once` puts its connection in order."""

    def strike(*_: Any) -> None:
        raise SoftTimeLimit(1)

    with watching(engine(), "rollback", strike), pytest.raises(SoftTimeLimit), at_once(engine()) as connection:
        before = connection.execute(sql("SELECT pg_backend_pid()")).scalar_one()
    with engine().connect() as connection:
        assert connection.execute(sql("SELECT pg_backend_pid()")).scalar_one() == before
        connection.execute(sql("INSERT INTO public.test_sink (note) VALUES ('undone')"))
        connection.rollback()
    assert scalar("SELECT count(*) FROM public.test_sink") == 0


@pytest.mark.parametrize("how", ["error", "cut"])
def test_a_connection_that_failed_in_a_statement_is_as_good_as_new(how: str) -> None:
    statement = "SELECT 1 / 0" if how == "error" else "SELECT pg_terminate_backend(pg_backend_pid())"
    for _ in range(3):
        with pytest.raises(Exception, match=r"division|terminat"), at_once(engine()) as connection:
            connection.execute(sql(statement))
        with engine().connect() as connection:
            connection.execute(sql("INSERT INTO public.test_sink (note) VALUES ('undone')"))
            connection.rollback()
    assert scalar("SELECT count(*) FROM public.test_sink") == 0


def test_a_lease_that_ran_out_for_its_holder_only_is_still_settled_under_its_token() -> None:
    def overrun(each: Task) -> str:
        assert each.steps is not None
        held: Held = each.steps.held
        held.deadline = 0.0
        return "done"

    assert state(ran(overrun)) == ("SUCCEEDED", 0, None)
