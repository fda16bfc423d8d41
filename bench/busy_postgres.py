"""Keep PostgreSQL busy while something else is measured: pgbench, or the same kind of load if there is no pgbench.

The load has a database of its own on the same server. Without pgbench, `python -m bench.busy_postgres` runs on several
connections what pgbench does: UPDATE, INSERT and COMMIT. It reads the address from BUSY_URL.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import psycopg2
from sqlalchemy import make_url

from bench.peers.programs import MeasurementFailed
from child_process import ChildProcess
from embedded.postgres import Postgres, find_install
from settings import ROOT

CLIENTS: Final = 4
DATABASE: Final = "bench_load"
ADDRESS: Final = "BUSY_URL"
ACCOUNTS: Final = 100_000
LONGEST_SECONDS: Final = 3600
CREATE: Final = f"""
    CREATE TABLE IF NOT EXISTS account AS
        SELECT id, 0 AS balance, repeat('x', 80) AS filler FROM generate_series(1, {ACCOUNTS}) AS id;
    CREATE UNIQUE INDEX IF NOT EXISTS account_id ON account (id);
    CREATE TABLE IF NOT EXISTS account_history (account_id integer, change integer)
"""
UPDATE: Final = "UPDATE account SET balance = balance + %s WHERE id = %s"
INSERT: Final = "INSERT INTO account_history VALUES (%s, %s)"


@contextmanager
def busy_postgres(postgres: Postgres, folder: Path) -> Iterator[None]:
    """Run the load until the end of the block. Its log is written to `folder`."""
    postgres.create_database(DATABASE)
    url = postgres.url(database=DATABASE)
    program = find_pgbench()
    command = prepare_pgbench(program, url) if program else [sys.executable, "-m", "bench.busy_postgres"]
    address = make_url(url)
    variables = {**os.environ, "PGPASSWORD": address.password or "", ADDRESS: url}
    load = ChildProcess("busy-postgres", command, log=folder / "busy-postgres.log", environment=variables, cwd=ROOT)
    try:
        yield
        if (code := load.exit_code()) is not None:
            raise MeasurementFailed(f"The load ended with code {code}: {load.last_lines()}")
    finally:
        load.kill()


def find_pgbench() -> Path | None:
    """Return the pgbench beside the server, or None."""
    path = find_install() / "bin" / "pgbench"
    return path if path.exists() else None


def prepare_pgbench(program: Path, url: str) -> list[str]:
    """Create the tables of pgbench, and return the command that runs it. The password is in PGPASSWORD."""
    address = make_url(url)
    place = ["-h", address.host or "", "-p", str(address.port), "-U", address.username or "", DATABASE]
    variables = {**os.environ, "PGPASSWORD": address.password or ""}
    initialize = [str(program), "--initialize", "--scale=5", "--quiet", *place]
    subprocess.run(initialize, env=variables, check=True, capture_output=True)
    clients = [f"--client={CLIENTS}", "--jobs=1", f"--time={LONGEST_SECONDS}", "--no-vacuum"]
    return [str(program), *clients, *place]


def run_load(url: str) -> None:
    """Update and insert on several connections, until the process is killed."""
    with closing(psycopg2.connect(url)) as connection, connection.cursor() as cursor:
        cursor.execute(CREATE)
        connection.commit()
    threads = [threading.Thread(target=_change_accounts, args=(url,)) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _change_accounts(url: str) -> None:
    with closing(psycopg2.connect(url)) as connection, connection.cursor() as cursor:
        while True:
            account = random.randint(1, ACCOUNTS)  # noqa: S311 - not a secret
            cursor.execute(UPDATE, (1, account))
            cursor.execute(INSERT, (account, 1))
            connection.commit()


if __name__ == "__main__":
    run_load(os.environ[ADDRESS])
