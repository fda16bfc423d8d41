"""Real workers with async handlers are killed and stopped while they run hundreds of tasks at once."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import settings
import tasks
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
DOES = "payload ->> 'does'"
EFFECTS = sql("SELECT count(*), count(DISTINCT task_id) FROM public.chaos_effect")
KINDS = ("fails", "hangs", "is cancelled")  # of every fiftieth task; the others just end
EXPIRE_ONE_LEASE = sql("""
    UPDATE ledger.task_lease SET lease_until = ledger.ledger_now() - interval '1 s', is_extended = true WHERE token = (
        SELECT lease_token FROM ledger.ingest_task WHERE status = 'RUNNING' AND payload ->> 'does' = 'waits' LIMIT 1)
""")


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


def submitted(count: int, seconds: float, *, type: str = "async.effect", **payload: str) -> list[uuid.UUID]:
    return submit_each([NewTask(type, {"seconds": seconds, **payload})] * count)


def submit_mixed(does: list[str], **payload: str) -> list[uuid.UUID]:
    return submit_each([NewTask("async.mixed", {"seconds": 0.05, "does": each, **payload}) for each in does])


def submit_each(new: list[NewTask]) -> list[uuid.UUID]:
    with sessions()() as session:
        ids = [each.task_id for each in submit_many(session, new)]
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
        return not rows(where="status NOT IN ('SUCCEEDED', 'DISCARDED')")

    wait_until(done, "all have ended well", seconds=seconds)


def cancel_running() -> list[uuid.UUID]:
    """Cancel those that wait for it and run now, and return them."""
    found: list[uuid.UUID] = []

    def cancel_some() -> bool:
        for (id_,) in rows("id", f"{DOES} = 'is cancelled' AND status = 'RUNNING'"):
            with suppress(tasks.AlreadyDone):
                if tasks.cancel(id_) == "RUNNING":
                    found.append(id_)
        return bool(found)

    wait_until(cancel_some, "a running task was cancelled", seconds=30)
    return found


def lose_a_lease() -> set[uuid.UUID]:
    """Let reclaim take the tasks of one claim away from a worker that goes on running them."""
    with engine().begin() as connection:
        connection.execute(EXPIRE_ONE_LEASE)
    ticks.run("reclaim")
    return isolated()


def isolated() -> set[uuid.UUID]:
    """Return the tasks that run alone because the process that ran them was lost."""
    return {id_ for (id_,) in rows("id", "isolated")}


def effects() -> tuple[int, int]:
    with engine().begin() as connection:
        return tuple(connection.execute(EFFECTS).one())


@pytest.mark.guarantee
def test_a_thousand_tasks_of_all_kinds_are_settled_once_although_leases_are_lost_and_processes_killed_and_stopped(
    servers: settings.Settings, programs: list[ChildProcess], tmp_path: Path
) -> None:
    """Failures, time-outs, cancelled tasks, a lost lease, kill -9 of a child process, and SIGTERM, in mid-flight."""
    programs.append(first := start_worker(tmp_path, "first"))
    first.await_ready()
    submit_mixed([KINDS[n // 50 % len(KINDS)] if n % 50 == 0 else "ends" for n in range(TASKS - 40)])
    wait_until(lambda: running() >= 150, "both processes run many tasks at once", seconds=30)
    cancelled = cancel_running()
    psutil.Process(first.popen.pid).children()[0].kill()
    wait_until(isolated, "the tasks of the killed process run alone", seconds=30)
    first_gate, gate = tmp_path / "first gate", tmp_path / "gate"
    waiting = submit_mixed(["waits"] * 20, file=str(first_gate))
    wait_until(lambda: lose_a_lease() & set(waiting), "the tasks of a lost lease run alone", seconds=30)
    first_gate.touch()
    slow = submitted(20, 0, file=str(gate))
    wait_until(lambda: rows(where="type = 'async.effect' AND status = 'RUNNING'"), "a slow task runs", seconds=30)
    first.popen.terminate()
    first.popen.wait(20)
    assert running() == 0, "a worker that stops releases what is unfinished"
    assert any(("RUNNING", "QUEUED") in transitions(id_) for id_ in slow), "no task was released"
    gate.touch()
    programs.append(second := start_worker(tmp_path, "second"))
    second.await_ready()
    await_all()
    assert {id_ for (id_,) in rows("id", "status = 'DISCARDED'")} == set(cancelled)
    succeeded = TASKS - len(cancelled)
    assert effects() == (succeeded, succeeded)
    assert set(rows("attempt_count", f"{DOES} = 'ends'")) == {(0,)}, "a loss was charged to a task"
    assert set(rows("attempt_count", f"{DOES} IN ('fails', 'hangs')")) == {(1,)}


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


@pytest.mark.guarantee
@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_a_worker_ends_although_a_plain_function_of_a_step_hangs_in_a_thread(
    servers: settings.Settings, programs: list[ChildProcess], tmp_path: Path, pool: str
) -> None:
    options = ("-P", pool, "-c", "1", "--without-gossip", "--without-mingle")
    programs.append(worker := start_celery(tmp_path, pool, "worker", *options))
    worker.await_ready()
    submitted(3, 0, type="async.hangs")
    wait_until(lambda: running() == 3, "all run at once", seconds=30)
    worker.popen.terminate()
    worker.popen.wait(30)
    assert rows("status, attempt_count") == [("QUEUED", 0)] * 3


@pytest.mark.guarantee
def test_a_worker_that_finishes_what_it_runs_gives_free_places_to_no_other_tasks(
    servers: settings.Settings, programs: list[ChildProcess], tmp_path: Path
) -> None:
    programs.append(worker := start_worker(tmp_path, "finishes"))
    worker.await_ready()
    submitted(TASKS, 1)
    wait_until(lambda: running() >= 150, "both processes run many tasks at once", seconds=30)
    worker.popen.send_signal(signal.SIGINT)  # a warm shutdown
    worker.popen.wait(30)
    assert running() == 0
    left = rows(where="status = 'QUEUED'")
    assert len(left) >= TASKS / 2, "it went on with other tasks"
    assert effects() == (TASKS - len(left), TASKS - len(left))
