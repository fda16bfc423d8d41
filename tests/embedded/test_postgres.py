"""The embedded PostgreSQL is durable, shares its database with an application, and starts after interrupted runs."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from embedded import postgres_account
from embedded.home import Home
from embedded.postgres import CONFIGURATION, Postgres
from embedded.postgres_account import UNPRIVILEGED_USER, PostgresAccount, PostgresUnusable
from embedded.program import Program
from models.engine import make_engine
from models.schema import migrate
from tests.servers import Cluster, ServersOfTests


@contextmanager
def started(home: Home, **configuration: str) -> Iterator[Postgres]:
    port = home.ports({"postgres": 0}, wished={})["postgres"]
    server = Postgres(home, port, configuration={"fsync": "off"} | configuration)
    program = Program(
        "postgres",
        server.command,
        prepare=server.prepare,
        is_ready=server.is_ready,
        popen_options=server.popen_options,
    )
    child = program.start(home)
    try:
        child.await_ready()
        yield server
    finally:
        child.end(20, stop_signal=signal.SIGINT)


def setting(server: Postgres, name: str) -> str:
    connection = psycopg2.connect(server.url(superuser=True, database="postgres"))
    with connection.cursor() as cursor:
        cursor.execute(f"SHOW {name}")
        row = cursor.fetchone()
    connection.close()
    assert row
    return str(row[0])


@pytest.fixture
def fresh(tmp_path: Path) -> Home:
    home = Home(tmp_path / "ho me")
    home.create()
    return home


def test_a_commit_is_on_disk_by_default(fresh: Home) -> None:
    with started(fresh, fsync="on") as server:
        found = {name: setting(server, name) for name in ("fsync", "synchronous_commit", "full_page_writes")}
        assert found == dict.fromkeys(found, "on")
        assert int(setting(server, "max_prepared_transactions")) > 0
        assert setting(server, "listen_addresses") == "127.0.0.1"
        assert setting(server, "server_version").startswith("18.")
    assert CONFIGURATION["fsync"] == "on"


def test_the_role_of_the_application_is_not_a_superuser_and_needs_its_password(servers: ServersOfTests) -> None:
    server = servers.cluster.server
    server.create_database()
    connection = psycopg2.connect(server.url())
    with connection.cursor() as cursor:
        cursor.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
        assert cursor.fetchone() == (False,)
    connection.close()
    with pytest.raises(psycopg2.OperationalError, match="password"):
        psycopg2.connect(server.url().replace(servers.home.secrets["postgres"], "guess"))


@pytest.fixture
def shared_database(postgres: Cluster) -> Iterator[str]:
    """The address of a migrated database, as the embedded stack creates it for Celeriac and the user's application."""
    with postgres.temporary_database() as name:
        engine = make_engine(postgres.url(name))
        migrate(engine)
        engine.dispose()
        yield postgres.server.url(database=name)


def query(address: str, statement: str) -> list[Any]:
    connection = psycopg2.connect(address)
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []
    finally:
        connection.close()


def test_sql_that_names_no_schema_reaches_the_ledger(shared_database: str) -> None:
    ((id_,),) = query(shared_database, "SELECT ingest_submit('t', '{}')")
    assert query(shared_database, "SELECT id, status FROM ingest_task") == [(id_, "QUEUED")]


def test_the_statements_of_the_source_document_run_as_they_are_written(shared_database: str) -> None:
    """Those of its two walk-throughs, with their spelling; only the id is another one."""
    ((id_,),) = query(shared_database, "SELECT ingest_submit('t', '{}')")
    task = "SELECT id,status,attempt_count,next_retry_at,last_error,updated_at FROM ingest_task WHERE id='...'"
    ((found, status, attempts, due, error, _),) = query(shared_database, task.replace("...", id_))
    assert (found, status, attempts, due, error) == (id_, "QUEUED", 0, None, None)
    history = "SELECT * FROM ingest_task_transition WHERE task_id='...' ORDER BY id"
    assert len(query(shared_database, history.replace("...", id_))) == 1
    events = """SELECT id,status,attempt_count,next_retry_at,last_error,created_at,sent_at
FROM outbox_event
ORDER BY created_at DESC
LIMIT 20;"""
    ((_, status, attempts, due, error, _, sent_at),) = query(shared_database, events)
    assert (status, attempts, due, error, sent_at) == ("NEW", 0, None, None, None)


def test_tables_of_the_application_are_created_outside_the_ledgers_schema(shared_database: str) -> None:
    query(shared_database, "CREATE TABLE mine (id bigint PRIMARY KEY)")
    schema = "SELECT schemaname FROM pg_tables WHERE tablename = 'mine'"
    assert query(shared_database, schema) == [("public",)]


def test_the_half_finished_data_of_an_interrupted_initdb_is_not_used(fresh: Home) -> None:
    half = fresh.path / "postgres.new"
    half.mkdir()
    (half / "PG_VERSION").write_text("18\n")
    with started(fresh) as server:
        assert setting(server, "data_directory").endswith("/postgres")
    assert not half.exists()


def test_a_lock_file_with_a_reused_pid_does_not_prevent_the_start(fresh: Home) -> None:
    with started(fresh):
        pass
    (fresh.path / "postgres" / "postmaster.pid").write_text(f"{os.getpid()}\n{fresh.path}\n")
    with started(fresh) as server:
        assert server.is_ready()


def test_data_of_another_version_is_refused_and_left_unchanged(fresh: Home) -> None:
    (fresh.path / "postgres").mkdir()
    (fresh.path / "postgres" / "PG_VERSION").write_text("16\n")
    with pytest.raises(PostgresUnusable, match="belongs to PostgreSQL 16"):
        Postgres(fresh, 1).prepare()


def test_a_platform_without_the_package_gets_a_hint(monkeypatch: pytest.MonkeyPatch, fresh: Home) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(PostgresUnusable, match="set DATABASE_URL"):
        _ = Postgres(fresh, 1).command


@pytest.mark.skipif(os.geteuid() != 0, reason="root: only root runs PostgreSQL under another account")
def test_root_without_user_namespaces_runs_postgres_as_an_unprivileged_user(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_account, "user_namespaces_work", lambda: False)
    inner = Home(home.path.parent / "unprivileged")
    inner.create()
    with started(inner) as server:
        assert setting(server, "server_version").startswith("18.")
        assert (inner.path / "postgres").owner() == UNPRIVILEGED_USER
    monkeypatch.setattr(postgres_account, "user_namespaces_work", lambda: True)
    with started(inner) as server:
        assert (inner.path / "postgres").owner() == "root"


@pytest.mark.skipif(os.geteuid() != 0, reason="root: only root runs PostgreSQL under another account")
def test_an_install_that_this_user_cannot_read_is_copied(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_account, "user_namespaces_work", lambda: False)
    monkeypatch.setattr(PostgresAccount, "_can_reach", lambda _self, folder: "site-packages" not in str(folder))
    inner = Home(home.path.parent / "copied")
    inner.create()
    with started(inner) as server:
        assert str(inner.path) in " ".join(server.command[:1])


@pytest.mark.skipif(os.geteuid() != 0, reason="root: only root runs PostgreSQL under another account")
def test_root_without_user_namespaces_in_a_private_folder_is_told_what_to_do(
    fresh: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_account, "user_namespaces_work", lambda: False)
    with pytest.raises(PostgresUnusable, match="run as an ordinary user"):
        _ = Postgres(fresh, 1).command
