"""What a worker's main process does for its children and for a beat that is silent."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

import failpoint
from checks import workers
from models.engine import engine
from models.sql import sql
from tasks import ticks
from tasks.core.holders import holder_of
from tasks.execution.deliver import ingest
from tasks.recovery.tick_rows import BEAT, record_tick, single_flight
from tasks.worker_watch import ChildPids, WorkerWatch
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import claimed, raising, submitted
from tests.tasks.work import OnPurpose, rows

pytestmark = pytest.mark.usefixtures("ledger")


def test_a_killed_child_is_taken_over_at_once_by_its_parent(ledger: ServersOfTests) -> None:
    ids = submitted(1)
    children = {os.getpid()}
    attendant = WorkerWatch(lambda: set(children), runs_ticks=False)
    pid = os.fork()
    if pid == 0:
        failpoint.arm("ingest.after_claim=kill")
        ingest(engine(), ids)
        os._exit(1)
    children.add(pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its parent has yet to fetch its exit code
    attendant.look()
    assert rows("status, attempt_count, error_code") == [("RETRYING", 1, "worker_lost")]
    os.waitpid(pid, 0)


def test_a_child_that_is_lost_before_the_first_look_or_while_its_lease_is_locked_is_not_forgotten() -> None:
    ids = submitted(1)
    children = {gone()}
    (pid,) = children
    claimed(ids, holder=holder_of(pid))
    attendant = WorkerWatch(lambda: set(children), runs_ticks=False)
    attendant.start()
    attendant.stop()
    children.clear()
    with engine().connect() as somebody:
        somebody.execute(sql("SELECT FROM ledger.task_lease FOR UPDATE"))
        attendant.look()
        assert rows("status") == [("RUNNING",)]
    attendant.look()
    assert rows("status, error_code") == [("RETRYING", "worker_lost")]


def test_a_child_that_got_the_number_of_a_lost_one_keeps_its_tasks() -> None:
    children: set[int] = set()
    attendant = WorkerWatch(lambda: children, runs_ticks=False)
    attendant._lost[os.getpid()] = 5
    children.add(os.getpid())
    claimed(submitted(1), holder=holder_of(os.getpid()))
    attendant.look()
    assert rows("status, attempt_count") == [("RUNNING", 0)]


def test_a_namesake_in_another_container_keeps_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    pid = gone()
    claimed(submitted(1), holder=holder_of(pid))
    monkeypatch.setattr("tasks.core.holders.WORKER", "another")
    WorkerWatch(lambda: {pid}, runs_ticks=False).look()
    assert rows("status, attempt_count") == [("RUNNING", 0)]


def test_a_child_that_was_born_and_died_between_two_looks_is_taken_over_at_once() -> None:
    births = ChildPids()
    attendant = WorkerWatch(set, born=births.received, runs_ticks=False)
    pid = gone(births.send_own)
    claimed(submitted(1), holder=holder_of(pid))
    attendant.look()
    assert rows("status, error_code") == [("RETRYING", "worker_lost")]
    assert births.received() == set()


def test_an_attendant_that_cannot_look_after_children_still_ticks(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr("tasks.ticks.run", ran.append)
    attendant = WorkerWatch(lambda: 1 / 0, runs_ticks=True)  # type: ignore[arg-type, return-value]
    with engine().begin() as connection:
        record_tick(connection, BEAT, holder="beat")
    move(ledger, 21)
    attendant.look()
    assert sorted(ran) == ["prune", "reclaim", "relay"]


def gone(before: Callable[[], None] = lambda: None) -> int:
    """The pid of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        before()
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_what_is_wrong_with_a_lease_keeps_no_wakeup_from_being_woken_again_and_the_doctor_says_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(ticks, "take_over", raising(OnPurpose("no")))
    monkeypatch.setattr("tasks.recovery.lost_wakeups.wake_again", lambda *_, **__: looked.append("wakeups"))
    with pytest.raises(OnPurpose):
        ticks.run("reclaim")
    assert looked == ["wakeups"]
    (found,) = workers._ticks()
    assert (found.name, found.level, found.message) == ("tick.reclaim", "fail", "failed the last time: OnPurpose: no")
    monkeypatch.undo()
    ticks.run("reclaim")
    assert [finding.level for finding in workers._ticks()] == ["ok"]


@pytest.mark.parametrize("said", ["a\x00b", "half a \ud83d"])
def test_a_tick_that_fails_with_what_postgresql_cannot_hold_is_over_all_the_same(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticks, "take_over", raising(OnPurpose(said)))
    with pytest.raises(OnPurpose):
        ticks.run("reclaim")
    assert [finding.level for finding in workers._ticks()] == ["fail"]
    with single_flight(engine(), "reclaim", holder="another", seconds=60) as began:
        assert began


def test_a_worker_ticks_by_itself_while_beat_is_silent(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr("tasks.ticks.run", ran.append)
    attendant = WorkerWatch(set, runs_ticks=True)
    with engine().begin() as connection:
        record_tick(connection, BEAT, holder="beat")
    attendant.look()
    assert ran == []
    move(ledger, 21)
    attendant._look_at_beat_at = 0.0
    attendant.look()
    assert sorted(ran) == ["prune", "reclaim", "relay"]
    with engine().begin() as connection:
        record_tick(connection, BEAT, holder="beat")
    attendant.look()
    attendant.look()
    assert len(ran) == 3
