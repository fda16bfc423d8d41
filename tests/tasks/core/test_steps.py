"""Durable steps: a result is stored once, never by a worker that lost the task, and a loop resumes at its place."""

from __future__ import annotations

import math
import uuid
from typing import Any

import pytest
from sqlalchemy.orm import Session

import failpoint
import settings
from models.engine import engine, make_engine
from models.sql import sql
from tasks import LeaseLost
from tasks.core.steps import Steps
from tasks.core.task import Task
from tasks.execution.deliver import deliver
from tasks.operations import dead_tasks
from tasks.recovery.reclaim import reclaim_leases
from tests.servers import ServersOfTests
from tests.tasks.deliveries import audits, change, delivered, handled, leases, scalar, submitted, take_away
from tests.tasks.ledger_line import Line
from tests.tasks.lost_workers import LEASE, killed, later, reclaim_lost
from tests.tasks.outside import TYPE, ran
from tests.tasks.work import OnPurpose, rows, task

STEPS = sql("SELECT name, result FROM ledger.task_step WHERE task_id = :id ORDER BY created_at, name")
CALLS = sql("SELECT note FROM public.test_sink ORDER BY number")
CALLED = sql("INSERT INTO public.test_sink (note) VALUES (:note)")


pytestmark = pytest.mark.usefixtures("ledger")


def called(note: str, result: Any = None) -> Any:
    """Call something outside the ledger: the note can be counted even if the caller is killed."""
    with engine().begin() as connection:
        connection.execute(CALLED, {"note": note})
    return note if result is None else result


def calls() -> list[str]:
    with engine().begin() as connection:
        return list(connection.execute(CALLS).scalars())


def stored(id_: uuid.UUID) -> dict[str, Any]:
    with engine().begin() as connection:
        found = connection.execute(STEPS, {"id": id_}).all()
    return {row.name: row.result for row in found}


def three_steps(each: Task) -> Any:
    first = each.step("first", called, "first", {"n": 1})
    second = each.step("second", called, "second", [first["n"], 2])
    return each.step("third", called, "third", [*second, 3])


def test_a_retry_does_not_repeat_a_step() -> None:
    seen: list[Any] = []

    def fail_twice(each: Task) -> Any:
        seen.append(each.step("fetch", called, "fetch", {"n": [1, None, "é"]}))
        if len(seen) < 3:
            raise OnPurpose
        return seen[-1]

    id_ = ran(fail_twice, times=3)
    assert calls() == ["fetch"]
    assert seen == [{"n": [1, None, "é"]}] * 3
    assert (task(id_)["status"], task(id_)["attempt_count"], task(id_)["result"]) == ("SUCCEEDED", 2, seen[0])


def test_a_step_that_fails_is_called_again() -> None:
    tries: list[int] = []

    def flaky() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise OnPurpose
        return "done"

    id_ = ran(lambda each: each.step("flaky", flaky), times=2)
    assert (len(tries), task(id_)["result"], stored(id_)) == (2, "done", {"flaky": "done"})


@pytest.mark.guarantee
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize(("place", "again"), [("steps.before_keep", True), ("steps.after_keep", False)])
def test_a_killed_worker_repeats_at_most_its_last_step(
    place: str, again: bool, nth: int, ledger: ServersOfTests
) -> None:
    names = ["first", "second", "third"]
    with handled(TYPE, three_steps, transactional=False, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        killed([id_], f"{place}=kill@{nth}")
        assert calls() == names[:nth]
        assert list(stored(id_)) == names[: nth - again]
        assert reclaim_lost(ledger).charged == 1
        delivered([id_])
    assert calls() == names[:nth] + names[nth - again :]
    assert (task(id_)["status"], task(id_)["result"]) == ("SUCCEEDED", [1, 2, 3])


@pytest.mark.guarantee
def test_a_worker_whose_task_was_reclaimed_can_neither_store_a_step_nor_settle(ledger: ServersOfTests) -> None:
    told: list[str] = []

    def oversleep(each: Task) -> Any:
        if each.attempt_count:
            return each.step("late", lambda: "by the second")
        later(ledger, LEASE + 1)
        assert reclaim_leases(engine(), settings.current()).charged == 1
        delivered([each.id])  # another worker finishes it
        try:
            each.step("late", lambda: "by the first")
        except LeaseLost as error:
            told.append(str(error))
            raise
        raise AssertionError("the step was stored")

    id_ = ran(oversleep)
    assert len(told) == 1
    assert stored(id_) == {"late": "by the second"}
    assert (task(id_)["status"], task(id_)["attempt_count"]) == ("SUCCEEDED", 1)
    assert audits() == [(id_, "lease_lost")]
    assert leases() == 0


@pytest.mark.parametrize("how", ["taken", "discarded", "released"])
def test_a_worker_that_lost_the_task_stores_and_reads_no_step(how: str) -> None:
    changes = {
        "discarded": "status = 'DISCARDED', lease_token = NULL, finished_at = ledger.ledger_now()",
        "released": "status = 'QUEUED', lease_token = NULL",
    }

    def lose(each: Task) -> None:
        each.step("before", lambda: 1)
        change(each.id, changes[how]) if how in changes else take_away(each.id)
        for name in ("after", "before"):  # not even the known result is returned
            with pytest.raises(LeaseLost):
                each.step(name, lambda: 2)
        with pytest.raises(LeaseLost):
            list(each.resume("loop", range(3)))
        with pytest.raises(LeaseLost):
            each.check_lease()

    id_ = ran(lose)
    assert stored(id_) == {"before": 1}
    assert task(id_)["status"] == {"taken": "RUNNING", "discarded": "DISCARDED", "released": "QUEUED"}[how]
    assert audits() == [(id_, "late_success")]


def test_a_step_renews_a_lease_that_has_expired_and_was_not_reclaimed() -> None:
    """After an outage, for example, during which the heartbeat could not renew it."""

    def starve(each: Task) -> None:
        assert each.steps is not None
        each.steps.held.deadline = 0.0
        each.step("late", lambda: 1)
        assert each.steps.held.is_good

    id_ = ran(starve, max_attempts=1)
    assert (stored(id_), task(id_)["status"], task(id_)["attempt_count"]) == ({"late": 1}, "SUCCEEDED", 0)


def test_a_step_does_not_call_its_function_if_the_lease_has_expired_and_was_reclaimed() -> None:
    calls: list[str] = []

    def starve(each: Task) -> None:
        assert each.steps is not None
        take_away(each.id)
        with engine().begin() as connection:
            connection.execute(sql("DELETE FROM ledger.task_lease"))
        each.steps.held.deadline = 0.0
        each.step("late", lambda: calls.append("called"))

    id_ = ran(starve)
    assert (calls, stored(id_), audits()) == ([], {}, [(id_, "lease_lost")])


def test_two_writers_of_one_step_both_get_the_first_result() -> None:
    def run_twice(each: Task) -> list[Any]:
        assert each.steps is not None
        another = Steps(engine(), each.id, each.steps.held)
        another._known()  # it has loaded the steps before
        return [each.step("same", lambda: "mine"), another.run("same", lambda: "yours")]

    assert task(ran(run_twice))["result"] == ["mine", "mine"]


def test_a_result_is_the_same_the_first_time_and_after_a_retry() -> None:
    """PostgreSQL writes large numbers and negative zero differently from Python."""
    values = [1e22, -0.0, 1.0, (1, 2), {"a": None}, None, True, "x" * 1000, 2**70, 0.1]
    seen: list[list[Any]] = []

    def twice(each: Task) -> None:
        seen.append([each.step(str(place), values.__getitem__, place) for place in range(len(values))])
        if len(seen) == 1:
            raise OnPurpose

    ran(twice, times=2)
    first, second = seen
    assert list(map(repr, first)) == list(map(repr, second))


def test_a_step_result_that_cannot_be_stored_fails_only_its_task() -> None:
    bad = {1: object(), 2: math.nan, 3: "a\x00b", 4: "\ud800", 5: "x" * 2_000_000}
    with handled(TYPE, lambda each: each.step("bad", bad.get, each.payload, "good"), transactional=False):
        ids = submitted(7, TYPE, lambda n: n)
        delivered(ids)
    assert rows() == [("SUCCEEDED", 0), *[("RETRYING", 1)] * 5, ("SUCCEEDED", 0)]
    for id_ in ids[1:6]:
        assert "result of the step 'bad'" in task(id_)["error_message"]
        assert stored(id_) == {}


def test_an_invalid_name_is_refused_before_the_function_is_called() -> None:
    done: list[int] = []
    names: list[Any] = ["", "x" * 201, "a\nb", "a\x00b", None, 7]
    with handled(TYPE, lambda each: each.step(names[each.payload], done.append, 1), transactional=False):
        delivered(submitted(len(names), TYPE, lambda n: n))
    assert (done, rows()) == ([], [("RETRYING", 1)] * len(names))
    assert all("1 to 200 characters" in message for (message,) in rows("error_message"))


def test_a_name_cannot_be_used_for_a_step_and_for_a_loop() -> None:
    """Otherwise the place of the loop would be returned as the result of the step, which would never be called."""

    def loop_then_step(each: Task) -> Any:
        list(each.resume("rows", range(3)))
        return each.step("rows", lambda: "called")

    def step_then_loop(each: Task) -> Any:
        each.step("rows", lambda: {"done": 2})
        return list(each.resume("rows", range(3)))

    for script in (loop_then_step, step_then_loop):
        found = task(ran(script))
        assert (found["status"], found["result"]) == ("RETRYING", None)
        assert "each needs a name of its own" in found["error_message"]


def test_a_transactional_handler_cannot_use_steps() -> None:
    def step(each: Task, _db: Session) -> Any:
        return each.step("no", lambda: 1)

    with handled(TYPE, step):
        (id_,) = submitted(1, TYPE)
        delivered([id_])
    assert "transactional=False" in task(id_)["error_message"]


def test_requeueing_a_dead_task_keeps_its_steps() -> None:
    def die_once(each: Task) -> str:
        each.step("charge", called, "charge")
        if not each.payload and len(calls()) == 1 and task(each.id)["max_attempts"] == 1:
            change(each.id, "max_attempts = 2")
            raise OnPurpose
        return "done"

    with handled(TYPE, die_once, transactional=False, max_attempts=1):
        (id_,) = submitted(1, TYPE)
        delivered([id_])
        assert task(id_)["status"] == "DEAD"
        list(dead_tasks.requeue(engine(), dead_tasks.Choice(ids=[id_]), actor="me"))
        delivered([id_])
    assert (task(id_)["status"], calls()) == ("SUCCEEDED", ["charge"])


@pytest.mark.guarantee
@pytest.mark.parametrize(("nth", "place"), [(1, "before"), (3, "before"), (1, "after"), (4, "after")])
def test_a_killed_loop_skips_no_item_and_repeats_at_most_one_interval(
    nth: int, place: str, ledger: ServersOfTests
) -> None:
    every, items = 4, [f"{n:02}" for n in range(18)]

    def go_through(each: Task) -> None:
        for number, item in enumerate(each.resume("rows", items, every=every)):
            called(item)
            if place == "before" and number == nth * every - 1:
                failpoint.failpoint("steps.before_keep")

    with handled(TYPE, go_through, transactional=False, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        killed([id_], f"steps.before_keep=kill;steps.after_keep=kill@{nth}")
        first = calls()
        assert reclaim_lost(ledger).charged == 1
        delivered([id_])
    assert task(id_)["status"] == "SUCCEEDED"
    second = calls()[len(first) :]
    assert first == items[: len(first)]
    assert second == items[len(items) - len(second) :], "the second run goes from one place to the end"
    repeated = len(first) + len(second) - len(items)
    assert repeated == (every if place == "before" else 0)
    assert stored(id_) == {"rows": {"done": len(items)}}


def test_a_failed_loop_repeats_the_failed_item_and_a_finished_loop_does_nothing() -> None:
    items = list(range(10))
    for bad in items:
        seen: list[int] = []

        def go_through(each: Task, bad: int = bad, seen: list[int] = seen) -> None:
            for item in each.resume("rows", items, every=3):
                seen.append(item)
                if item == bad and not each.attempt_count:
                    raise OnPurpose
            if each.attempt_count == 1:
                raise OnPurpose

        ran(go_through, times=3)
        assert seen[: bad + 1] == items[: bad + 1]
        again = seen[bad + 1 :]
        assert again == items[again[0] :]
        assert bad - 3 < again[0] <= bad, "the failed item again, and at most two before it"


@pytest.mark.parametrize("arrives", [True, False])
def test_a_step_whose_answer_is_lost_is_stored_and_not_called_again(arrives: bool) -> None:
    line = Line(settings.current().database_url)
    far = make_engine(line.url)

    def cut(each: Task) -> Any:
        def effect() -> str:
            called("effect")
            line.cut_at('INSERT INTO "celeriac".task_step', but_it_arrives=arrives)
            return "done"

        return each.step("effect", effect)

    with handled(TYPE, cut, transactional=False, retriable=[OnPurpose]):
        (id_,) = submitted(1, TYPE)
        deliver(far, [id_])
    far.dispose()
    line.close()
    assert line._cut_at is None, "the connection was not cut"
    assert (task(id_)["status"], task(id_)["attempt_count"], calls()) == ("SUCCEEDED", 0, ["effect"])


def test_no_transaction_is_open_while_the_function_of_a_step_runs() -> None:
    looks: list[int] = []
    idle = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'celeriac' AND state LIKE 'idle in%'"
    ran(lambda each: [each.step(name, lambda: looks.append(scalar(idle))) for name in ("one", "two")])
    assert looks == [0, 0]
