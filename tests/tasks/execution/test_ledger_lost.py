"""A lost connection to the ledger costs no attempt and runs no committed task again: the lease token decides."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import settings
from models import ledger_outage
from models.engine import engine, make_engine
from models.sql import sql
from tasks import Finish
from tasks.core.task import Task
from tasks.execution.decision import LIMIT_IN_OUTAGE
from tasks.execution.deliver import deliver
from tasks.execution.heartbeat import heartbeat
from tasks.execution.stopping import WorkerStops
from tasks.recovery.reclaim import Reclaimed, reclaim_leases
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import (
    are_well,
    audits,
    change,
    delivered,
    handled,
    inserting,
    leases,
    raising,
    scalar,
    submitted,
)
from tests.tasks.ledger_line import Line
from tests.tasks.lost_workers import later
from tests.tasks.work import OnPurpose, effects, insert, rows, task, transitions, wakeups

Script = Callable[[Task, Any], Any]


pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def cut(db: Session) -> None:
    """Let the server end the connection of this session; the session does not notice yet."""
    backend = db.execute(sql("SELECT pg_backend_pid()")).scalar_one()
    scalar("SELECT pg_terminate_backend(:pid, 10000)", pid=backend)


def noticed(_task: Task, db: Session) -> None:
    cut(db)
    db.execute(sql("SELECT 1"))


def noticed_by_the_driver(_task: Task, db: Any) -> None:
    cut(db)
    db.cursor().execute("SELECT 1")


def not_noticed(_task: Task, db: Session) -> None:
    cut(db)


def swallowed(each: Task, db: Session) -> None:
    with suppress(DBAPIError):
        noticed(each, db)


def made_another_error_of(each: Task, db: Session) -> None:
    try:
        noticed(each, db)
    except DBAPIError as error:
        raise RuntimeError("my own words") from error


LOSSES = [noticed, noticed_by_the_driver, not_noticed, swallowed, made_another_error_of]


def times(count: int, script: Script) -> Script:
    done: list[uuid.UUID] = []

    def first_times(each: Task, db: Any) -> None:
        if done.count(each.id) < count:
            done.append(each.id)
            script(each, db)

    return first_times


def once(script: Script) -> Script:
    return times(1, script)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_that_loses_its_connection_is_not_charged_and_runs_one_by_one_after_the_second_time(
    loss: Script,
) -> None:
    ids = inserting({1: times(2, loss)}, 3)
    delivered(ids)
    assert rows("status, attempt_count, isolated") == [("QUEUED", 0, False)] * 3
    assert (effects(), leases(), audits()) == ({}, 0, [])
    delivered(ids)
    assert rows("status, attempt_count, isolated") == [("RETRYING", 0, True)] * 3
    assert (effects(), leases(), audits()) == ({}, 0, [])
    assert sorted(len(wakeup.ids) for wakeup in wakeups())[:3] == [1, 1, 1]
    delivered(ids)
    assert rows() == [("SUCCEEDED", 0)] * 3
    assert effects() == dict.fromkeys(ids, 1)


@pytest.mark.guarantee
@pytest.mark.parametrize("loss", LOSSES)
def test_a_task_that_loses_its_connection_when_alone_is_released_and_not_charged(loss: Script) -> None:
    (id_,) = inserting({0: once(loss)}, 1)
    delivered([id_])
    assert rows("status, attempt_count, error_code, isolated") == [("QUEUED", 0, None, False)]
    assert (effects(), leases(), audits()) == ({}, 0, [])
    assert wakeups()[-1].ids == [id_]
    delivered([id_])
    assert (rows(), effects()) == ([("SUCCEEDED", 0)], {id_: 1})


@pytest.mark.guarantee
def test_a_handler_that_crashes_its_own_backend_is_charged_at_the_third_loss_in_a_row() -> None:
    (id_,) = inserting({0: noticed}, 1, max_attempts=2)
    for expected in [("QUEUED", 0), ("QUEUED", 0), ("RETRYING", 1)]:
        delivered([id_])
        assert rows() == [expected]
    assert task(id_)["error_code"] == "ledger_lost"
    change(id_, "next_retry_at = ledger.ledger_now()")
    for expected in [("QUEUED", 1), ("QUEUED", 1), ("DEAD", 2)]:  # another outcome ends the row of losses
        delivered([id_])
        assert rows() == [expected]
    assert effects() == {}


@pytest.mark.usefixtures("clock")
def test_a_task_that_loses_the_connection_does_not_keep_its_batch_from_running() -> None:
    """The part of the batch behind a failed task loses its connection: it is released, and runs when it is woken."""
    ids = inserting({0: raising(OnPurpose()), 2: once(noticed)}, 5)
    delivered(ids)
    assert rows("status, attempt_count, isolated") == [("RETRYING", 1, False), *[("QUEUED", 0, False)] * 4]
    assert (effects(), leases()) == ({}, 0)
    assert set(wakeups()[-1].ids) == set(ids[1:])
    delivered(ids[1:])
    assert effects() == dict.fromkeys(ids[1:], 1)


@pytest.mark.usefixtures("clock")
def test_of_a_batch_that_runs_one_by_one_only_the_task_that_loses_the_connection_is_released() -> None:
    cut_once = once(noticed)
    tries: list[int] = []

    def many(tasks: Sequence[Task], db: Session) -> None:
        tries.append(len(tasks))
        for each in tasks:
            insert(each, db)
            if each.payload == 0:
                raise OnPurpose
            if each.payload == 2:
                cut_once(each, db)

    with handled("test.bulk", many, many=True):
        ids = submitted(5, "test.bulk", lambda n: n)
        delivered(ids)
        assert tries == [5, 1, 1, 1, 1, 1]
        assert rows() == [("RETRYING", 1), ("SUCCEEDED", 0), ("QUEUED", 0), ("SUCCEEDED", 0), ("SUCCEEDED", 0)]
        assert (effects(), leases()) == (dict.fromkeys([ids[1], *ids[3:]], 1), 0)
        delivered([ids[2]])
    assert effects() == dict.fromkeys(ids[1:], 1)


@pytest.mark.guarantee
@pytest.mark.parametrize("transactional", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_work_that_is_finished_while_the_ledger_is_unreachable_is_kept_until_it_answers(
    count: int, transactional: bool, line: Line, through_the_line: Engine, outage: list[str]
) -> None:
    calls: list[int] = []

    def outside(each: Task) -> str:
        calls.append(each.payload)
        if len(calls) == 1:
            line.go_down()
        return "done"

    def inside(each: Task, _db: Session) -> str:
        return outside(each)

    with handled("test.elsewhere", inside if transactional else outside, transactional=transactional, max_attempts=1):
        ids = submitted(count, "test.elsewhere", lambda n: n)
        deliver(through_the_line, ids)
        assert len(outage) == 5
        if transactional:  # its transaction was lost, so it runs again
            assert {attempts for _, attempts in rows()} == {0}
            deliver(through_the_line, ids)
        else:
            deliver(through_the_line, ids[1:])  # the slow batch has left the others to other workers
            assert calls == list(range(count)), "a finished handler ran again"
    assert rows("status, attempt_count, result") == [("SUCCEEDED", 0, "done")] * count
    assert (leases(), audits()) == (0, [])
    assert ledger_outage.outage._since is None


@pytest.mark.guarantee
def test_a_message_is_kept_while_the_ledger_is_unreachable(
    line: Line, through_the_line: Engine, outage: list[str]
) -> None:
    ids = submitted(3)
    line.go_down()
    deliver(through_the_line, ids)
    assert len(outage) == 5
    are_well(ids)


@pytest.mark.parametrize("count", [1, 3])
def test_a_claim_whose_answer_was_lost_is_released_and_claimed_again_when_the_ledger_answers(
    count: int, line: Line, through_the_line: Engine, outage: list[str]
) -> None:
    deliver(through_the_line, submitted(1))  # prepares the statement
    ids = submitted(count)
    line.cut_at("EXECUTE", but_it_arrives=True)
    deliver(through_the_line, ids)
    assert len(outage) == 5, "the ledger stayed unreachable after the answer was lost"
    assert (set(rows()), leases()) == ({("SUCCEEDED", 0)}, 0)
    assert [to for _, to in transitions(ids[0])] == ["QUEUED", "RUNNING", "QUEUED", "RUNNING", "SUCCEEDED"]


@pytest.mark.guarantee
@pytest.mark.parametrize("arrives", [True, False])
def test_a_finish_that_loses_its_connection_is_written_again_and_its_handler_does_not_run_again(
    arrives: bool, line: Line, through_the_line: Engine
) -> None:
    called: list[str] = []

    def write(each: Task, db: Session) -> None:
        insert(each, db)
        called.append("write")
        if called.count("write") == 1:
            line.cut_at("COMMIT", but_it_arrives=arrives)

    def work(each: Task) -> Finish:
        called.append("handler")
        return Finish(lambda db: write(each, db), "done")

    with handled("test.elsewhere", work, transactional=False, max_attempts=1):
        (id_,) = submitted(1, "test.elsewhere")
        deliver(through_the_line, [id_])
    assert called == ["handler", "write", "write"]
    assert rows("status, attempt_count, result") == [("SUCCEEDED", 0, "done")]
    assert (effects(), leases(), audits()) == ({id_: 1}, 0, [])


def test_steps_wait_for_an_unreachable_ledger(line: Line, through_the_line: Engine, outage: list[str]) -> None:
    def work(each: Task) -> list[Any]:
        first = each.step("first", lambda: "before")
        line.go_down()
        assert each.steps is not None
        each.steps.held.deadline = 0.0  # the lease could not be renewed, and has expired
        return [first, each.step("second", lambda: "after")]

    with handled("test.elsewhere", work, transactional=False, max_attempts=1):
        deliver(through_the_line, submitted(1, "test.elsewhere"))
    assert rows("status, attempt_count, result") == [("SUCCEEDED", 0, ["before", "after"])]
    assert len(outage) == 5


@pytest.mark.guarantee
def test_a_soft_limit_that_strikes_a_step_while_it_waits_for_the_ledger_releases_the_task(
    line: Line, through_the_line: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat uses the same line: an answer to it would say that the outage is over."""
    monkeypatch.setattr(heartbeat(), "_engine", through_the_line)

    def work(each: Task) -> None:
        line.go_down()
        try:
            each.step("stored", lambda: "result")
        finally:
            line.is_down = False

    with handled("test.elsewhere", work, transactional=False, max_attempts=1, soft_limit_seconds=0.5):
        (id_,) = submitted(1, "test.elsewhere")
        deliver(through_the_line, [id_])
    assert rows("status, attempt_count, error_code") == [("QUEUED", 0, None)]
    assert transitions(id_, "to_status, message")[-1] == ("QUEUED", LIMIT_IN_OUTAGE.why)
    assert (leases(), audits()) == (0, [])


def test_an_effect_outside_the_ledger_is_settled_although_all_connections_are_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = make_engine(settings.current().database_url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    taken: list[Connection] = []

    def free_one(*_: Any, **__: Any) -> None:
        if taken:
            taken.pop().close()

    monkeypatch.setattr("models.ledger_outage.logger.warning", free_one)

    with handled("test.elsewhere", lambda _task: taken.append(small.connect()), transactional=False):
        deliver(small, submitted(1, "test.elsewhere"))
    small.dispose()
    assert (rows(), leases(), taken) == ([("SUCCEEDED", 0)], 0, [])


def test_a_task_is_not_charged_for_a_prepared_statement_that_the_server_has_dropped() -> None:
    def drop(each: Task) -> None:
        if each.payload == "drop":
            with engine().begin() as connection:
                connection.execute(sql("DEALLOCATE ALL"))

    def drop_inside(each: Task, db: Session) -> None:
        if each.payload == "drop":
            db.execute(sql("DEALLOCATE ALL"))

    with handled("test.elsewhere", drop, transactional=False), handled("test.inside", drop_inside):
        for type in ["test.elsewhere", "test.inside"]:
            for payload in ["prepare", "drop"]:
                delivered(submitted(1, type, payload))
    assert (rows(), leases()) == ([("SUCCEEDED", 0)] * 4, 0)


@pytest.mark.parametrize(("count", "found"), [(1, Reclaimed(1, charged=1)), (3, Reclaimed(1, isolated=3))], ids=str)
def test_a_worker_that_must_stop_while_the_ledger_is_unreachable_leaves_its_tasks_to_reclaim(
    count: int, found: Reclaimed, line: Line, ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_error: BaseException) -> None:
        monkeypatch.undo()
        raise WorkerStops(0)

    def lose_for_good(_task: Task, _db: Session) -> None:
        line.close()
        monkeypatch.setattr(ledger_outage.outage, "note_failure", stop)
        monkeypatch.setattr("tasks.execution.run.STOP_SECONDS", 0.1)

    ids = inserting({0: once(lose_for_good)}, count)
    with pytest.raises(WorkerStops):
        deliver(make_engine(line.url), ids)
    assert set(rows("status, lease_token IS NULL")) == {("RUNNING", False)}
    assert leases() == 1
    move(ledger, settings.current().ingest_lease_seconds + 1)
    reclaim_leases(engine(), settings.current())  # reclaim has not run for long, so it only extends the leases
    later(ledger, settings.current().ingest_lease_seconds + 1)
    assert reclaim_leases(engine(), settings.current()) == found
    assert effects() == {}


def test_after_a_lost_connection_the_next_message_runs_on_a_new_one() -> None:
    ids = inserting({0: once(noticed)}, 1)
    delivered(ids)
    good = submitted(5)
    delivered(good)
    assert {task(id_)["status"] for id_ in good} == {"SUCCEEDED"}
