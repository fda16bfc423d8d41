"""Real workers are killed, stopped and paused in the middle of their work, and every effect happens once."""

from __future__ import annotations

import signal
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

import settings
from chaos.handlers import CREATE
from chaos.programs import start_worker, wait_until
from child_process import ChildProcess, OwnProcess
from embedded.home import Home
from embedded.roles import PORTS
from embedded.stack import embedded_servers
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import NewTask, submit_many, ticks
from tests.tasks.own_servers import own_servers
from tests.tasks.work import rows, transitions

VARIABLES = {"INGEST_HANDLERS": "chaos.handlers", "INGEST_RETRY_BASE_BACKOFF_MS": "0"}
RESTARTED: list[ChildProcess] = []


@pytest.fixture(scope="module")
def quick() -> Iterator[settings.Settings]:
    with own_servers(VARIABLES, CREATE) as current:
        yield current
    for child in RESTARTED:
        child.exit_code()


@pytest.fixture(autouse=True)
def emptied(quick: settings.Settings) -> None:
    with engine().begin() as connection:
        tables = ("ingest_task", "ingest_task_transition", "task_lease", "task_audit", "outbox_event", "tick")
        connection.execute(sql(f"TRUNCATE public.chaos_effect, {', '.join(f'ledger.{name}' for name in tables)}"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Return a function that starts workers; they are killed at the end of the test."""
    started: list[ChildProcess] = []

    def start(name: str, **variables: str) -> ChildProcess:
        started.append(program := start_worker(tmp_path, name, **variables))
        program.await_ready()
        return program

    yield start
    for program in started:
        program.kill()


def submitted(
    count: int, seconds: float = 0, *, ends_its_process: int | None = None, max_attempts: int = 50
) -> list[uuid.UUID]:
    """Submit tasks; the one with the number `ends_its_process` kills the process that runs it."""
    payloads = [{"seconds": seconds, "ends_its_process": n == ends_its_process} for n in range(count)]
    with sessions()() as session:
        new = [NewTask("chaos.effect", payload, max_attempts=max_attempts) for payload in payloads]
        ids = [each.task_id for each in submit_many(session, new)]
        session.commit()
    assert after_commit_publisher().wait_until_idle(20)
    return ids


def await_all(status: str = "SUCCEEDED", *, seconds: float = 60) -> None:
    """Wait until all tasks have this status, and run the ticks that beat would send."""

    def done() -> bool:
        ticks.run("relay")
        ticks.run("reclaim")
        return not rows(where=f"status <> '{status}'")

    wait_until(done, f"all are {status}", seconds=seconds)


def effects() -> list[tuple[int, int]]:
    with engine().begin() as connection:
        found = connection.execute(sql("SELECT count(*), count(DISTINCT task_id) FROM public.chaos_effect"))
        return [tuple(row) for row in found]


def children(program: ChildProcess) -> list[psutil.Process]:
    return psutil.Process(program.popen.pid).children()


def holders() -> set[str]:
    with engine().begin() as connection:
        return {
            name.rpartition("-")[0]
            for name in connection.execute(sql("SELECT holder FROM ledger.task_lease")).scalars()
        }


def names(program: ChildProcess) -> set[str]:
    return {f"{socket.gethostname()}:{child.pid}" for child in children(program)}


@pytest.mark.guarantee
def test_workers_killed_again_and_again_at_every_place_leave_each_effect_once(start: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    storm = "ingest.after_claim=kill@6;ingest.after_effect=kill@4;ingest.after_settle=kill@5"
    start("storm", FAILPOINTS=storm, FAILPOINT_TRACE=str(trace))
    submitted(80)
    await_all(seconds=90)
    assert effects() == [(80, 80)]
    assert {"ingest.after_claim", "ingest.after_effect", "ingest.after_settle"} <= set(trace.read_text().split())
    lost = [one for (one,) in rows("id", "attempt_count > 0 OR isolated")]
    assert lost, "no process was killed while it held a task, so nothing is proved"


@pytest.mark.guarantee
def test_a_worker_that_is_stopped_releases_its_tasks_without_charging_them(start: Any) -> None:
    first = start("first", FAILPOINTS="ingest.in_handler=sleep:60")
    ids = submitted(8)
    wait_until(lambda: holders() & names(first), "the worker holds a lease", seconds=20)
    first.popen.terminate()
    first.popen.wait(20)
    assert holders() == set()
    assert set(rows("status, attempt_count")) <= {("QUEUED", 0), ("SUCCEEDED", 0)}
    assert any(("RUNNING", "QUEUED") in transitions(id_) for id_ in ids), "no task was released"
    start("second")
    await_all()
    assert effects() == [(8, 8)]
    assert set(rows("attempt_count")) == {(0,)}


@pytest.mark.guarantee
def test_a_worker_that_is_paused_for_longer_than_its_lease_can_no_longer_write(start: Any) -> None:
    paused = start("paused")
    submitted(10, seconds=0.3)
    wait_until(lambda: holders() & names(paused), "the worker holds a lease", seconds=20)
    for process in (psutil.Process(paused.popen.pid), *children(paused)):
        process.send_signal(signal.SIGSTOP)
    start("running")
    await_all()
    for process in (psutil.Process(paused.popen.pid), *children(paused)):
        process.send_signal(signal.SIGCONT)
    audit = sql("SELECT count(*) FROM ledger.task_audit WHERE code IN ('late_success', 'lease_lost')")

    def refused() -> bool:
        with engine().begin() as connection:
            return bool(connection.execute(audit).scalar_one())

    wait_until(refused, "a write of the paused worker was refused", seconds=20)
    assert effects() == [(10, 10)]
    assert set(rows("status")) == {("SUCCEEDED",)}


@pytest.mark.guarantee
def test_a_killed_child_is_replaced_and_its_tasks_run_again_at_once(start: Any) -> None:
    """Beat does not run here: the worker watch notices the loss."""
    program = start("parent")
    submitted(10, seconds=0.3)
    wait_until(lambda: holders() & names(program), "the worker holds a lease", seconds=20)
    (victim, *_) = (child for child in children(program) if f"{socket.gethostname()}:{child.pid}" in holders())
    victim.kill()
    wait_until(lambda: not rows(where="status <> 'SUCCEEDED'"), "all succeeded", seconds=30)
    assert effects() == [(10, 10)]
    messages = {message for id_ in rows("id") for (message,) in transitions(id_[0], "message") if message}
    assert any(f"{socket.gethostname()}:{victim.pid}-" in message for message in messages)


@pytest.mark.guarantee
def test_flushing_the_broker_in_the_middle_loses_no_task_and_no_effect(start: Any, quick: settings.Settings) -> None:
    start("worker")
    submitted(100, seconds=0.02)
    wait_until(lambda: rows(where="status = 'SUCCEEDED'"), "some have succeeded", seconds=20)
    with redis.Redis.from_url(quick.broker_url) as client:
        client.flushall()
    assert rows(where="status <> 'SUCCEEDED'"), "the flush came too late to prove anything"
    await_all()
    assert effects() == [(100, 100)]
    assert set(rows("attempt_count")) == {(0,)}


@pytest.mark.guarantee
def test_a_task_that_kills_its_process_is_soon_dead_and_harms_no_other_task(start: Any) -> None:
    """Beat does not run, and the lease lasts for minutes: the worker watch must notice each killed child."""
    start("mortal", INGEST_LEASE_SECONDS="300")
    ids = submitted(10, ends_its_process=6, max_attempts=3)
    poison = ids[6]
    wait_until(lambda: not rows(where="status NOT IN ('SUCCEEDED', 'DEAD')"), "all are final", seconds=60)
    assert rows("status, attempt_count, error_code", f"id = '{poison}'") == [("DEAD", 3, "worker_lost")]
    assert set(rows("status, attempt_count", f"id <> '{poison}'")) == {("SUCCEEDED", 0)}
    assert effects() == [(9, 9)]


@pytest.mark.slow
def test_restarting_the_database_in_the_middle_loses_no_effect(start: Any, quick: settings.Settings) -> None:
    start("worker")
    submitted(60, seconds=0.1)
    wait_until(lambda: len(rows(where="status = 'SUCCEEDED'")) >= 10, "some have succeeded", seconds=30)
    restart_postgres(Home(quick.celeriac_home))
    await_all(seconds=90)
    assert effects() == [(60, 60)]
    assert not rows(where="status = 'DEAD'")


def restart_postgres(home: Home) -> None:
    """Stop it with SIGINT, which ends all sessions, and start it again."""
    process = OwnProcess.read(home.pid_file("postgres"))
    assert process is not None
    process.send_signal(signal.SIGINT)
    assert process.wait(30)
    programs, _ = embedded_servers(home, home.ports(dict.fromkeys(PORTS, 0), wished={}))
    (postgres,) = (one for one in programs if one.role == "postgres")
    RESTARTED.append(again := postgres.start(home))
    wait_until(again.is_ready, "PostgreSQL is ready", seconds=30)
    engine().dispose()
