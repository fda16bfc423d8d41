"""Connections to the ledger: unreachable servers, broken connections, and forks."""

from __future__ import annotations

import os
import socket
import traceback
from types import SimpleNamespace

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.exc import DataError, OperationalError

import settings
from models.engine import engine, make_engine, sessions
from models.errors import Unreachable


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture
def configured(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(settings, "current", lambda: SimpleNamespace(database_url=database))
    return database


def test_an_unreachable_server_is_reported_with_host_and_port_but_without_the_password(free_port: int) -> None:
    unreachable = make_engine(f"postgresql+psycopg2://me:hunter2@127.0.0.1:{free_port}/ledger")
    with pytest.raises(Unreachable) as caught, unreachable.connect():
        pass
    assert caught.value.message == f"PostgreSQL at 127.0.0.1:{free_port} is unreachable: Connection refused."
    assert caught.value.exit_code == 3
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_rejected_password_does_not_appear_in_the_error(database: str) -> None:
    wrong = make_url(database).set(password="hunter2")
    with pytest.raises(Unreachable, match="password authentication failed") as caught:
        make_engine(wrong.render_as_string(hide_password=False)).connect()
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_connection_that_breaks_later_raises_an_error_of_sqlalchemy(database: str) -> None:
    own = make_engine(database)
    with own.connect() as victim:
        pid = victim.scalar(text("SELECT pg_backend_pid()"))
        with own.connect() as killer:
            killer.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
        with pytest.raises(OperationalError):
            victim.execute(text("SELECT 1"))
    own.dispose()


def test_the_pool_replaces_a_connection_that_died_while_it_was_idle(database: str) -> None:
    own = make_engine(database)
    with own.connect() as idle, own.connect() as killer:
        pid = idle.scalar(text("SELECT pg_backend_pid()"))
        idle.close()
        killer.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
        with own.connect() as fresh:
            assert fresh.scalar(text("SELECT pg_backend_pid()")) != pid
    own.dispose()


def test_parameters_in_the_url_win_over_our_defaults(database: str) -> None:
    for url, name in ((database, "celeriac"), (f"{database}?application_name=mine", "mine")):
        own = make_engine(url)
        with own.connect() as connection:
            assert connection.scalar(text("SHOW application_name")) == name
        own.dispose()


def test_a_process_shares_one_engine_and_one_session_factory(configured: str) -> None:
    assert engine() is engine()
    assert sessions() is sessions()
    with sessions()() as session:
        assert session.scalar(text("SELECT 1")) == 1
    engine().dispose()


def test_a_forked_child_does_not_use_the_connections_of_its_parent(configured: str) -> None:
    def backend() -> int:
        with engine().connect() as connection:
            return int(connection.scalar(text("SELECT pg_backend_pid()")) or 0)

    ours = backend()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write, str(backend()).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as said:
        assert int(said.read()) != ours
    assert backend() == ours
    engine().dispose()


def test_parameters_do_not_appear_in_error_messages(database: str) -> None:
    own = make_engine(database)
    with own.connect() as connection, pytest.raises(DataError, match="division by zero") as caught:
        connection.execute(text("SELECT CAST(:secret AS text), 1 / 0"), {"secret": "hunter2"})
    assert "hunter2" not in str(caught.value)
    own.dispose()
