"""Workers of every pool keep the handlers' limits, and a worker that stops charges no task."""

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
from tasks import NewTask, submit_many
from tests.tasks.own_servers import own_servers
from tests.tasks.pool_handlers import CREATE
from tests.tasks.work import rows, transitions

VARIABLES = {"INGEST_HANDLERS": "tests.tasks.pool_handlers", "INGEST_LEASE_SECONDS": "60"}


@pytest.fixture(scope="module")
def servers() -> Iterator[settings.Settings]:
    with own_servers(VARIABLES, CREATE) as current:
        yield current


@pytest.fixture(autouse=True)
def emptied(servers: settings.Settings) -> None:
    with engine().begin() as connection:
        tables = ("ingest_task", "ingest_task_transition", "task_lease", "task_audit", "outbox_event", "tick")
        connection.execute(sql(f"TRUNCATE public.pool_effect, {', '.join(f'ledger.{name}' for name in tables)}"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Return a function that starts workers; they are killed at the end of the test."""
    started: list[ChildProcess] = []

    def start(pool: str, concurrency: int = 1, **variables: str) -> ChildProcess:
        options = ("-P", pool, "-c", str(concurrency), "-n", f"{pool}{len(started)}@%h")
        program = start_celery(
            tmp_path, f"{pool}{len(started)}", "worker", *options, "--without-gossip", "--without-mingle", **variables
        )
        started.append(program)
        program.await_ready()
        return program

    yield start
    for program in started:
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
        return tuple(found.one())  # type: ignore[return-value]


def await_status(*expected: str, seconds: float = 30) -> None:
    statuses = ", ".join(f"'{each}'" for each in expected)
    wait_until(lambda: not rows(where=f"status NOT IN ({statuses})"), f"all are {expected}", seconds=seconds)


@pytest.mark.guarantee
def test_a_handler_that_never_lets_another_thread_run_is_killed_after_its_hard_limit(start: Any) -> None:
    """Neither a signal nor the heartbeat's thread reaches it: the worker's main process must kill the child."""
    program = start("prefork")
    submitted("pool.holds_the_gil")
    await_status("DEAD")
    assert rows("status, attempt_count, error_code, error_message") == [
        ("DEAD", 1, "timeout", "The handler exceeded its hard limit of 1 s; its process was killed.")
    ]
    (id_,) = submitted("pool.effect")
    wait_until(lambda: rows(where=f"id = '{id_}' AND status = 'SUCCEEDED'"), "the worker goes on", seconds=20)
    assert program.popen.poll() is None
