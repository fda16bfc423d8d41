"""The embedded PostgreSQL keeps what it confirmed, and starts whatever an earlier run left behind."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2
import pytest

from embedded import unprivileged
from embedded.home import Home
from embedded.part import Part, Running
from embedded.postgres import CONFIGURATION, Postgres
from embedded.unprivileged import PostgresUnusable
from tests.servers import ServersOfTests, wait_until


@contextmanager
def started(home: Home, **configuration: str) -> Iterator[Postgres]:
    port = home.ports({"postgres": 0}, wished={})["postgres"]
    server = Postgres(home, port, configuration={"fsync": "off"} | configuration)
    part = Part("postgres", server.command, prepare=server.prepare, popen_options=server.popen_options)
    running = Running(home, part)
    try:
        wait_until(lambda: running.exit_code() is not None or server.is_ready(), "PostgreSQL is ready")
        assert running.exit_code() is None, running.last_words()
        yield server
    finally:
        running.process.ask_to_end(signal.SIGINT)
        running.popen.wait(20)


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


def test_a_ledger_that_forgets_commits_is_not_the_default(fresh: Home) -> None:
    with started(fresh, fsync="on") as server:
        found = {name: setting(server, name) for name in ("fsync", "synchronous_commit", "full_page_writes")}
        assert found == dict.fromkeys(found, "on")
        assert int(setting(server, "max_prepared_transactions")) > 0
        assert setting(server, "listen_addresses") == "127.0.0.1"
        assert setting(server, "server_version").startswith("18.")
    assert CONFIGURATION["fsync"] == "on"


def test_the_applications_role_is_no_superuser_and_needs_its_password(servers: ServersOfTests) -> None:
    server = servers.cluster.server
    server.create_database()
    connection = psycopg2.connect(server.url())
    with connection.cursor() as cursor:
        cursor.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
        assert cursor.fetchone() == (False,)
    connection.close()
    with pytest.raises(psycopg2.OperationalError, match="password"):
        psycopg2.connect(server.url().replace(servers.home.secrets["postgres"], "guess"))


def test_an_interrupted_initdb_leaves_nothing_that_looks_like_data(fresh: Home) -> None:
    half = fresh.path / "postgres.new"
    half.mkdir()
    (half / "PG_VERSION").write_text("18\n")
    with started(fresh) as server:
        assert setting(server, "data_directory").endswith("/postgres")
    assert not half.exists()


def test_a_lock_file_with_a_reused_pid_does_not_stop_the_start(fresh: Home) -> None:
    with started(fresh):
        pass
    (fresh.path / "postgres" / "postmaster.pid").write_text(f"{os.getpid()}\n{fresh.path}\n")
    with started(fresh) as server:
        assert server.is_ready()


def test_data_of_another_version_is_left_alone_with_a_sentence(fresh: Home) -> None:
    (fresh.path / "postgres").mkdir()
    (fresh.path / "postgres" / "PG_VERSION").write_text("16\n")
    with pytest.raises(PostgresUnusable, match="belongs to PostgreSQL 16"):
        Postgres(fresh, 1).prepare()


def test_a_platform_without_the_wheel_gets_a_hint(monkeypatch: pytest.MonkeyPatch, fresh: Home) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(PostgresUnusable, match="set DATABASE_URL"):
        _ = Postgres(fresh, 1).command


@pytest.mark.skipif(os.geteuid() != 0, reason="root: PostgreSQL as root needs a run as root")
def test_root_without_user_namespaces_runs_it_as_nobody(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unprivileged, "user_namespaces_work", lambda: False)
    inner = Home(home.path.parent / "as nobody")
    inner.create()
    with started(inner) as server:
        assert setting(server, "server_version").startswith("18.")
        assert (inner.path / "postgres").owner() == "nobody"
    monkeypatch.setattr(unprivileged, "user_namespaces_work", lambda: True)
    with started(inner) as server:
        assert (inner.path / "postgres").owner() == "root"


@pytest.mark.skipif(os.geteuid() != 0, reason="root: PostgreSQL as root needs a run as root")
def test_an_install_that_nobody_cannot_reach_is_copied(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unprivileged, "user_namespaces_work", lambda: False)
    monkeypatch.setattr(unprivileged.WayToRun, "_can_reach", lambda _self, folder: "site-packages" not in str(folder))
    inner = Home(home.path.parent / "copied")
    inner.create()
    with started(inner) as server:
        assert str(inner.path) in " ".join(server.command[:1])


@pytest.mark.skipif(os.geteuid() != 0, reason="root: PostgreSQL as root needs a run as root")
def test_root_without_user_namespaces_in_a_closed_folder_gets_a_sentence(
    fresh: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unprivileged, "user_namespaces_work", lambda: False)
    with pytest.raises(PostgresUnusable, match="run as an ordinary user"):
        _ = Postgres(fresh, 1).command
