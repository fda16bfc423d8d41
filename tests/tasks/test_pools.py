"""Workers of every pool keep the limits of handlers, and a worker that stops charges no task."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import settings
from chaos.programs import start_celery, wait_until
from child_process import ChildProcess
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import NewTask, submit_many, ticks
from tasks.operations.discard import discard
from tasks.pools import UnsupportedPool, supported_pool
from tests.nodes.programs import celery, run
from tests.tasks.own_servers import own_servers
from tests.tasks.pool_handlers import CREATE, MEET_SECONDS, THREADS
from tests.tasks.work import rows, transitions

VARIABLES = {"INGEST_HANDLERS": "tests.tasks.pool_handlers", "INGEST_LEASE_SECONDS": "60"}
SOFT_LIMIT = "SoftTimeLimit: The handler exceeded its soft limit of 0.5 s."
HARD_LIMIT = "The handler exceeded its hard limit of 1 s; its process was killed."


@pytest.fixture(scope="module")
def servers() -> Iterator[settings.Settings]:
    with own_servers(VARIABLES, CREATE) as current:
        yield current


def empty() -> None:
    with engine().begin() as connection:
        tables = (
            "ingest_task",
            "ingest_task_transition",
            "task_lease",
            "task_audit",
            "outbox_event",
            "tick",
            "task_limit",
        )
        connection.execute(sql(f"TRUNCATE public.pool_effect, {', '.join(f'ledger.{name}' for name in tables)}"))


@pytest.fixture(autouse=True)
def emptied(servers: settings.Settings) -> None:
    empty()


def worker(folder: Path, pool: str, concurrency: int) -> ChildProcess:
    options = ("-P", pool, "-c", str(concurrency), "-n", f"{pool}-{concurrency}@%h")
    program = start_celery(folder, pool, "worker", *options, "--without-gossip", "--without-mingle")
    program.await_ready()
    return program


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Return a function that starts workers; they are killed at the end of the test."""
    started: list[ChildProcess] = []

    def start(pool: str, concurrency: int = 1) -> ChildProcess:
        started.append(worker(tmp_path, pool, concurrency))
        return started[-1]

    yield start
    for program in started:
        program.kill()


@pytest.fixture(scope="class")
def fifty_threads(servers: settings.Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    empty()  # a task that the test before has left would run here
    program = worker(tmp_path_factory.mktemp("threads"), "threads", THREADS)
    yield
    program.kill()


def submitted(type_: str, *, count: int = 1, seconds: float = 0) -> list[uuid.UUID]:
    with sessions()() as session:
        new = [NewTask(type_, {"seconds": seconds}) for _ in range(count)]
        ids = [each.task_id for each in submit_many(session, new)]
        session.commit()
    assert after_commit_publisher().wait_until_idle(20)
    return ids


def effects() -> tuple[int, int]:
    with engine().begin() as connection:
        found = connection.execute(sql("SELECT count(*), count(DISTINCT task_id) FROM public.pool_effect"))
        count, tasks = found.one()
        return count, tasks


def await_status(*expected: str, seconds: float = 30) -> None:
    statuses = ", ".join(f"'{each}'" for each in expected)
    wait_until(lambda: not rows(where=f"status NOT IN ({statuses})"), f"all are {expected}", seconds=seconds)


def await_insert() -> None:
    """Wait until a handler has inserted its row. The claim alone makes a task RUNNING, before its handler starts."""
    locks = "SELECT FROM pg_locks WHERE relation = CAST('public.pool_effect' AS regclass) AND mode = 'RowExclusiveLock'"

    def has_inserted() -> bool:
        with engine().begin() as connection:
            return connection.execute(sql(locks)).first() is not None

    wait_until(has_inserted, "the handler has inserted its row", seconds=30)


@pytest.mark.guarantee
def test_a_handler_that_never_lets_another_thread_run_is_killed_after_its_hard_limit(start: Any) -> None:
    """Neither a signal nor the heartbeat's thread reaches it: the worker's main process must kill the child."""
    program = start("prefork")
    submitted("pool.holds_the_gil")
    await_status("DEAD")
    assert rows("status, attempt_count, error_code, error_message") == [("DEAD", 1, "timeout", HARD_LIMIT)]
    (id_,) = submitted("pool.effect")
    wait_until(lambda: rows(where=f"id = '{id_}' AND status = 'SUCCEEDED'"), "the worker goes on", seconds=20)
    assert program.popen.poll() is None


@pytest.mark.guarantee
def test_a_solo_worker_that_gets_sigterm_releases_its_task_without_charging_it(start: Any) -> None:
    program = start("solo")
    (id_,) = submitted("pool.effect", seconds=60)
    await_insert()
    program.popen.terminate()
    program.popen.wait(10)
    assert rows("status, attempt_count, error_code") == [("QUEUED", 0, None)]
    assert transitions(id_, "message")[-1] == ("the worker stopped: WorkerStops",)
    assert effects() == (0, 0)
    assert "Traceback" not in program.output()


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_a_pool_of_greenlets_is_refused_although_its_package_is_there_or_not(pool: str) -> None:
    with pytest.raises(UnsupportedPool, match="-P threads"):
        supported_pool(pool)


def test_a_worker_with_greenlets_prints_one_line_that_names_the_alternatives(servers: settings.Settings) -> None:
    """The class is given in another way than with -P, because Celery imports gevent before it reads our code."""
    done = run(
        celery("-A", "tasks", "worker", "-P", "custom"),
        CELERY_CUSTOM_WORKER_POOL="celery.concurrency.gevent:TaskPool",
        CELERIAC_HOME=str(servers.celeriac_home),
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "celery: This pool cannot run handlers: use -P prefork, or -P threads"
    )


@pytest.mark.guarantee
def test_a_worker_with_threads_that_gets_sigterm_releases_all_tasks_although_a_thread_hangs(start: Any) -> None:
    """One handler waits in a system call, where no exception reaches it."""
    program = start("threads", 4)
    submitted("pool.effect", count=3, seconds=60)
    submitted("pool.hangs_for_long")
    await_status("RUNNING")
    program.popen.terminate()
    program.popen.wait(10)
    assert set(rows("status, attempt_count, error_code")) == {("QUEUED", 0, None)}
    assert effects() == (0, 0)
    with engine().begin() as connection:
        assert connection.execute(sql("SELECT count(*) FROM ledger.task_lease")).scalar_one() == 0


@pytest.mark.guarantee
def test_a_thread_that_exceeds_its_hard_limit_ends_its_worker_and_harms_no_other_task(start: Any) -> None:
    program = start("threads", 3)
    submitted("pool.effect", seconds=3)
    submitted("pool.outside", seconds=60)
    submitted("pool.hangs")
    program.popen.wait(20)
    ticks.run("reclaim")
    assert sorted(rows("type, status, attempt_count, error_code")) == [
        ("pool.effect", "SUCCEEDED", 0, None),
        ("pool.hangs", "DEAD", 1, "timeout"),
        ("pool.outside", "QUEUED", 0, None),
    ]
    assert rows("error_message", "type = 'pool.hangs'") == [(HARD_LIMIT,)]


# How many tasks of each tenant ran at once, at most: a task runs from its claim to its settling.
MOST_AT_ONCE = sql("""
    SELECT tenant, max(number) FROM (
        SELECT payload ->> 'tenant' AS tenant, sum(CASE to_status WHEN 'RUNNING' THEN 1 ELSE -1 END) OVER (
            PARTITION BY payload ->> 'tenant' ORDER BY happened.created_at, happened.id) AS number
        FROM ledger.ingest_task_transition happened JOIN ledger.ingest_task task ON task.id = task_id
        WHERE type = 'pool.limited' AND from_status IS NOT NULL) AS step
    GROUP BY tenant ORDER BY tenant
""")


@pytest.mark.guarantee
def test_two_workers_with_other_pools_together_keep_the_limits_of_a_type(start: Any) -> None:
    """Each tenant begins with two tasks that wait for each other, so both places are used."""
    limited = [NewTask("pool.limited", {"tenant": name, "meets": n < 2}) for n in range(15) for name in ("a", "b")]
    with sessions()() as session:
        submit_many(session, [*limited, *(NewTask("pool.rated") for _ in range(5))])
        session.commit()
    start("prefork", 3)
    start("threads", 3)
    wait_until(lambda: len(rows(where="status = 'SUCCEEDED'")) == 31, "all run that may", seconds=40)
    wait_until(lambda: len(rows(where="limited_at IS NOT NULL")) == 4, "the others wait", seconds=20)
    assert rows("type, status", "status <> 'SUCCEEDED'") == [("pool.rated", "QUEUED")] * 4
    assert set(rows("attempt_count")) == {(0,)}
    with engine().begin() as connection:
        assert connection.execute(MOST_AT_ONCE).all() == [("a", 2), ("b", 2)]


@pytest.mark.usefixtures("fifty_threads")
class TestFiftyThreads:
    """One worker with `-P threads -c 50`."""

    def test_all_threads_have_a_connection_although_sqlalchemys_pool_has_fifteen(self) -> None:
        submitted("pool.meets", count=THREADS)
        await_status("SUCCEEDED", seconds=MEET_SECONDS)
        assert effects() == (THREADS, THREADS)
        assert set(rows("attempt_count")) == {(0,)}

    def test_the_soft_limit_interrupts_a_handler_and_not_those_of_other_threads(self) -> None:
        submitted("pool.soft_limit", count=3, seconds=60)
        submitted("pool.effect", count=2, seconds=2)
        await_status("SUCCEEDED")
        assert sorted(rows("type, attempt_count")) == [("pool.effect", 0)] * 2 + [("pool.soft_limit", 1)] * 3
        assert effects() == (5, 5)
        messages = {message for (id_,) in rows("id") for (message,) in transitions(id_, "message") if message}
        assert SOFT_LIMIT in messages

    def test_a_discarded_task_is_interrupted_and_no_other(self) -> None:
        (discarded,), (other,) = submitted("pool.outside", seconds=60), submitted("pool.outside", seconds=4)
        await_status("RUNNING")
        discard(engine(), discarded, actor="test")
        wait_until(lambda: effects() == (1, 1), "the handler was interrupted", seconds=15)
        await_status("DISCARDED", "SUCCEEDED")
        assert rows("status, attempt_count", f"id = '{other}'") == [("SUCCEEDED", 0)]
        assert effects() == (1, 1)
