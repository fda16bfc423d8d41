"""Two installations in two schemas of one database, on one broker, do not touch each other."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import redis
from sqlalchemy import Connection, text

import settings
from models import schema
from models.engine import engine, make_engine
from tests.nodes.containers import WorkerNode
from tests.nodes.programs import celery, finish, start
from tests.servers import ServersOfTests, wait_until

NAMES = ("celeriac", "other")


@pytest.fixture
def other(stack: ServersOfTests, database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A second installation beside the one of the tests."""
    monkeypatch.setenv("LEDGER_SCHEMA", "other")
    settings.current.cache_clear()
    with_other_settings = make_engine(database)
    schema.migrate(with_other_settings)
    monkeypatch.delenv("LEDGER_SCHEMA")
    settings.current.cache_clear()
    yield
    with_other_settings.dispose()
    with stack.cluster.superuser.begin() as connection:
        connection.execute(text("DROP SCHEMA other CASCADE"))


def counts(name: str) -> dict[str, int]:
    """Return how many tasks of an installation have which status."""
    with engine().connect() as connection:
        found = connection.execute(text(f"SELECT status, count(*) FROM {name}.ingest_task GROUP BY status"))
        return {status: count for status, count in found}  # noqa: C416 - rows are not pairs for mypy


def run_at_once(
    command: list[str], installations: Sequence[str], variables: Mapping[str, str]
) -> list[CompletedProcess[str]]:
    """Run a command in these installations and wait for all of them."""
    with ExitStack() as running:
        started = [running.enter_context(start(command, LEDGER_SCHEMA=name, **variables)) for name in installations]
        return [finish(process) for process in started]


@pytest.mark.usefixtures("other")
def test_each_worker_runs_the_tasks_of_its_own_installation_only(
    celery_broker: Any, stack: ServersOfTests, database: str, tmp_path: Path
) -> None:
    url = celery_broker.container.url
    shared = {"DATABASE_URL": database, "BROKER_URL": url, "CELERIAC_HOME": str(stack.home.path)}
    workers = [
        WorkerNode(tmp_path / name, "-c", "1", LEDGER_SCHEMA=name, WORKER_RUN_TICKS="false", **shared) for name in NAMES
    ]
    try:
        for worker in workers:
            worker.ready()
        submit = [sys.executable, "manage.py", "submit", "demo.flaky", "{}", "--json"]
        for submitted in run_at_once(submit, ("celeriac", "other", "other"), shared):
            assert submitted.returncode == 0, submitted.stderr
            assert json.loads(submitted.stdout)["created"]
        wait_until(lambda: [counts(name) for name in NAMES] == [{"SUCCEEDED": 1}, {"SUCCEEDED": 2}], "all have run")
        for answer in run_at_once(celery("-A", "tasks", "inspect", "ping", "-t", "2"), NAMES, shared):
            assert "1 node online" in answer.stdout, answer.stdout + answer.stderr
        if url.startswith("redis"):
            with redis.Redis.from_url(url, decode_responses=True) as client:
                assert {key.partition(":")[0] for key in client.scan_iter()} == set(NAMES)
    finally:
        for worker in workers:
            worker.process.end()


@pytest.fixture
def first(stack: ServersOfTests) -> Iterator[Connection]:
    with engine().connect() as connection:
        yield connection


@pytest.fixture
def second(stack: ServersOfTests) -> Iterator[Connection]:
    """A connection that gives up instead of waiting for a lock of the first."""
    with engine().connect() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '1s'"))
        yield connection


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize(
    "statement",
    [
        "SELECT {0}.ingest_submit('t', '{{}}', 'key', partition_key => 'p')",
        "INSERT INTO {0}.outbox_event (destination, payload, ordering_key) VALUES ('d', '{{}}', 'k')",
    ],
    ids=["partition key", "ordering key"],
)
def test_a_key_that_one_installation_has_locked_is_free_in_the_other(
    statement: str, first: Connection, second: Connection
) -> None:
    first.execute(text(statement.format("celeriac")))
    second.execute(text(statement.format("other")))


@pytest.mark.usefixtures("other")
def test_a_migration_of_one_installation_does_not_wait_for_the_other(
    first: Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.execute(schema.MIGRATION_LOCK, {"schema": "celeriac"})
    monkeypatch.setenv("LEDGER_SCHEMA", "other")
    settings.current.cache_clear()
    migrating = make_engine(database)
    assert schema.migrate(migrating, lock_timeout_seconds=1) == schema.head_revision()
    migrating.dispose()
