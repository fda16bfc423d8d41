"""The worker watch reclaims the leases of lost children, and runs the ticks while beat is silent."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import failpoint
import settings
from checks import workers
from models.engine import engine
from models.sql import sql
from tasks import ticks, worker
from tasks.core.holders import holder_of
from tasks.execution.deliver import deliver
from tasks.recovery.tick_rows import BEAT, record_tick, single_flight
from tasks.worker_watch import ChildPids, WorkerWatch
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import claimed, raising, submitted
from tests.tasks.work import OnPurpose, rows

pytestmark = pytest.mark.usefixtures("ledger")


def test_the_lease_of_a_killed_child_is_reclaimed_at_once(ledger: ServersOfTests) -> None:
    ids = submitted(1)
    children = {os.getpid()}
    watch = WorkerWatch(lambda: set(children), runs_ticks=False)
    pid = os.fork()
    if pid == 0:
        failpoint.arm("ingest.after_claim=kill")
        deliver(engine(), ids)
        os._exit(1)
    children.add(pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    watch.check()
    assert rows("status, attempt_count, error_code") == [("RETRYING", 1, "worker_lost")]
    os.waitpid(pid, 0)


def test_a_child_that_dies_before_the_first_check_or_while_its_lease_is_locked_is_not_forgotten() -> None:
    ids = submitted(1)
    children = {ended_pid()}
    (pid,) = children
    claimed(ids, holder=holder_of(pid))
    watch = WorkerWatch(lambda: set(children), runs_ticks=False)
    watch.start()
    watch.stop()
    children.clear()
    with engine().connect() as other:
        other.execute(sql("SELECT FROM ledger.task_lease FOR UPDATE"))
        watch.check()
        assert rows("status") == [("RUNNING",)]
    watch.check()
    assert rows("status, error_code") == [("RETRYING", "worker_lost")]


def test_a_child_that_ended_while_it_waited_for_the_ledger_no_longer_counts_in_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    pid = ended_pid()
    gauge, counter = (tmp_path / f"{kind}_{pid}.db" for kind in ("gauge_livemax", "counter"))
    for file in (gauge, counter):
        file.touch()
    WorkerWatch(lambda: {pid}, runs_ticks=False).check()
    assert (gauge.exists(), counter.exists()) == (False, True)


def test_a_new_child_with_the_pid_of_a_lost_one_keeps_its_tasks() -> None:
    children: set[int] = set()
    watch = WorkerWatch(lambda: children, runs_ticks=False)
    watch._lost[os.getpid()] = 5
    children.add(os.getpid())
    claimed(submitted(1), holder=holder_of(os.getpid()))
    watch.check()
    assert rows("status, attempt_count") == [("RUNNING", 0)]


def test_a_process_with_the_same_host_name_and_pid_in_another_container_keeps_its_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pid = ended_pid()
    claimed(submitted(1), holder=holder_of(pid))
    monkeypatch.setattr("tasks.core.holders.WORKER", "another")
    WorkerWatch(lambda: {pid}, runs_ticks=False).check()
    assert rows("status, attempt_count") == [("RUNNING", 0)]


def test_the_lease_of_a_child_that_lived_only_between_two_checks_is_reclaimed_at_once() -> None:
    child_pids = ChildPids()
    watch = WorkerWatch(set, started=child_pids.received, runs_ticks=False)
    pid = ended_pid(child_pids.send_own)
    claimed(submitted(1), holder=holder_of(pid))
    watch.check()
    assert rows("status, error_code") == [("RETRYING", "worker_lost")]
    assert child_pids.received() == set()


def test_the_ticks_run_although_the_children_cannot_be_read(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr("tasks.ticks.run", ran.append)
    watch = WorkerWatch(lambda: 1 / 0, runs_ticks=True)  # type: ignore[arg-type, return-value]
    with engine().begin() as connection:
        record_tick(connection, BEAT, holder="beat")
    move(ledger, 21)
    watch.check()
    assert sorted(ran) == sorted(ticks.TICKS)


def test_only_a_worker_of_the_system_queue_runs_ticks_and_only_if_the_setting_lets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert worker._may_run_ticks()
    with monkeypatch.context() as other:
        other.setenv("LEDGER_SCHEMA", "another")  # this worker consumes the queue `system`, not `another.system`
        settings.current.cache_clear()
        assert not worker._may_run_ticks()
    monkeypatch.setenv("WORKER_RUN_TICKS", "false")
    settings.current.cache_clear()
    assert not worker._may_run_ticks()


def ended_pid(before: Callable[[], None] = lambda: None) -> int:
    """Return the pid of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        before()
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_lost_wakeups_are_repaired_although_reclaim_fails_and_check_reports_the_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repaired: list[str] = []
    monkeypatch.setattr(ticks, "reclaim_leases", raising(OnPurpose("no")))

    def repair(*_: object, **__: object) -> int:
        repaired.append("wakeups")
        return 0

    monkeypatch.setattr("tasks.recovery.lost_wakeups.repair", repair)
    with pytest.raises(OnPurpose):
        ticks.run("reclaim")
    assert repaired == ["wakeups"]
    (found,) = workers._check_ticks()
    assert (found.name, found.level, found.message) == ("tick.reclaim", "fail", "last run failed: OnPurpose: no")
    monkeypatch.undo()
    ticks.run("reclaim")
    assert [finding.level for finding in workers._check_ticks()] == ["ok"]


@pytest.mark.parametrize("message", ["a\x00b", "half a \ud83d"])
def test_a_tick_ends_although_postgresql_cannot_store_its_error(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticks, "reclaim_leases", raising(OnPurpose(message)))
    with pytest.raises(OnPurpose):
        ticks.run("reclaim")
    assert [finding.level for finding in workers._check_ticks()] == ["fail"]
    with single_flight(engine(), "reclaim", holder="another", seconds=60) as began:
        assert began


def test_a_worker_runs_the_ticks_while_beat_is_silent(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr("tasks.ticks.run", ran.append)
    watch = WorkerWatch(set, runs_ticks=True)
    with engine().begin() as connection:
        record_tick(connection, BEAT, holder="beat")
    watch.check()
    assert ran == []
    move(ledger, 21)
    watch._check_beat_at = 0.0
    watch.check()
    assert sorted(ran) == sorted(ticks.TICKS)
    with engine().begin() as connection:
        record_tick(connection, BEAT, holder="beat")
    watch.check()
    watch.check()
    assert len(ran) == len(ticks.TICKS)
