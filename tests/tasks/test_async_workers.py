"""Real workers with async handlers are killed and stopped while they run hundreds of tasks at once."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import settings
from chaos.handlers import CREATE
from chaos.programs import start_celery, start_worker, wait_until
from child_process import ChildProcess
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import NewTask, submit_many, ticks
from tests.tasks.own_servers import own_servers
from tests.tasks.work import rows, transitions

VARIABLES = {"INGEST_HANDLERS": "chaos.handlers,tests.tasks.async_handlers", "INGEST_RETRY_BASE_BACKOFF_MS": "0"}
TASKS = 1000
RUNNING = sql("SELECT count(*) FROM ledger.ingest_task WHERE status = 'RUNNING'")
EFFECTS = sql("SELECT count(*), count(DISTINCT task_id) FROM public.chaos_effect")


@pytest.fixture
def servers() -> Iterator[settings.Settings]:
    with own_servers(VARIABLES, CREATE) as current:
        yield current


@pytest.fixture
def programs() -> Iterator[list[ChildProcess]]:
    """Return a list for the programs of a test. They are killed at its end."""
    started: list[ChildProcess] = []
    yield started
    for program in started:
        program.kill()


def submitted(count: int, seconds: float, **payload: str) -> list[uuid.UUID]:
    new = NewTask("async.effect", {"seconds": seconds, **payload})
    with sessions()() as session:
        ids = [each.task_id for each in submit_many(session, [new] * count)]
        session.commit()
    assert after_commit_publisher().wait_until_idle(20)
    return ids


def running() -> int:
    with engine().begin() as connection:
        return int(connection.execute(RUNNING).scalar_one())


def await_all(*, seconds: float = 90) -> None:
    def done() -> bool:
        ticks.run("relay")
        ticks.run("reclaim")
        return not rows(where="status <> 'SUCCEEDED'")

    wait_until(done, "all have succeeded", seconds=seconds)


def effects() -> tuple[int, int]:
    with engine().begin() as connection:
        return tuple(connection.execute(EFFECTS).one())


@pytest.mark.guarantee
def test_a_thousand_tasks_are_settled_once_although_a_child_is_killed_and_the_worker_is_stopped(
    servers: settings.Settings, programs: list[ChildProcess], tmp_path: Path
) -> None:
    programs.append(first := start_worker(tmp_path, "first"))
    first.await_ready()
    submitted(TASKS - 20, 0.05)
    wait_until(lambda: running() >= 150, "both processes run many tasks at once", seconds=30)
    psutil.Process(first.popen.pid).children()[0].kill()
    wait_until(lambda: rows(where="isolated"), "the tasks of the killed process run alone", seconds=30)
    gate = tmp_path / "gate"
    slow = submitted(20, 0, file=str(gate))
    wait_until(lambda: rows(where="payload ? 'file' AND status = 'RUNNING'"), "a slow task runs", seconds=30)
    first.popen.terminate()
    first.popen.wait(20)
    assert running() == 0, "a worker that stops releases what is unfinished"
    assert any(("RUNNING", "QUEUED") in transitions(id_) for id_ in slow), "no task was released"
    gate.touch()
    programs.append(second := start_worker(tmp_path, "second"))
    second.await_ready()
    await_all()
    assert effects() == (TASKS, TASKS)
    assert set(rows("attempt_count")) == {(0,)}, "neither the kill nor the stop is charged to a task"


@pytest.mark.guarantee
def test_an_async_handler_in_a_thread_is_released_when_its_worker_stops(
    servers: settings.Settings, programs: list[ChildProcess], tmp_path: Path
) -> None:
    options = ("-P", "threads", "-c", "2", "--without-gossip", "--without-mingle")
    programs.append(worker := start_celery(tmp_path, "threads", "worker", *options))
    worker.await_ready()
    submitted(20, 0.01)
    await_all()
    submitted(10, 60)
    wait_until(lambda: running() == 10, "all run at once", seconds=30)
    worker.popen.terminate()
    worker.popen.wait(30)
    assert rows("status, attempt_count", "payload ->> 'seconds' = '60'") == [("QUEUED", 0)] * 10
    assert effects() == (20, 20)
