"""Run the scripts, commands and health checks of docker-compose.yml without Docker, on the servers of the tests."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import pytest
import redis

from checks.result import Level
from checks.servers import check_broker, check_receipts
from embedded.postgres import find_install
from embedded.redis import find_server
from models.engine import engine, make_engine
from models.schema import migrate
from settings import ROOT, Settings
from tasks.celery import app
from tasks.recovery.tick_rows import record_tick
from tests.compose import BIN, OURS, SERVICES, run, running
from tests.servers import Cluster, ServersOfTests, wait_until


def test_the_role_of_the_ledger_is_not_a_superuser_can_migrate_and_needs_no_schema_in_sql(
    postgres: Cluster, tmp_path: Path
) -> None:
    script = (ROOT / "deploy" / "postgres" / "ledger.sh").read_text()
    role = "compose_celeriac"  # the server of the tests already has a role named celeriac
    password = "it's 100% $HOME"
    beside = tmp_path / "ledger.sh"
    beside.write_text(re.sub(r"\b(ROLE|DATABASE|OWNER|TO) celeriac\b", rf"\1 {role}", script))
    parts = psycopg2.extensions.parse_dsn(postgres.server.url(superuser=True, database="postgres"))
    environment = {
        "PATH": f"{find_install() / 'bin'}:{os.environ['PATH']}",
        "PGHOST": parts["host"],
        "PGPORT": parts["port"],
        "PGPASSWORD": parts["password"],
        "DATABASE_PASSWORD": password,
    }
    address = psycopg2.extensions.make_dsn(
        host=parts["host"], port=parts["port"], user=role, password=password, dbname=role
    )
    try:
        subprocess.run(["sh", str(beside)], env=environment, check=True)
        with psycopg2.connect(address) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT rolsuper OR rolcreaterole OR rolcreatedb FROM pg_roles WHERE rolname = current_user")
            assert cursor.fetchone() == (False,)
        connection.close()
        ledger = make_engine("postgresql+psycopg2://", creator=lambda: psycopg2.connect(address))
        assert migrate(ledger)
        with ledger.begin() as session:
            id_ = session.exec_driver_sql("SELECT ingest_submit('t', '{}')").scalar_one()
            assert session.exec_driver_sql("SELECT id, status FROM ingest_task").all() == [(id_, "QUEUED")]
        ledger.dispose()
    finally:
        with postgres.admin.connect() as admin:
            admin.exec_driver_sql(f"DROP DATABASE IF EXISTS {role} WITH (FORCE)")
            admin.exec_driver_sql(f"DROP ROLE IF EXISTS {role}")


def test_the_receipt_redis_is_durable_and_hides_its_password(tmp_path: Path) -> None:
    with _redis_of("redis-receipts", tmp_path) as (url, pid):
        findings = list(check_receipts(Settings(REDIS_URL=url)))
        assert len(findings) > 3
        assert {finding.level for finding in findings} == {Level.OK}, findings
        if sys.platform == "linux":  # as in the image: Redis overwrites its arguments
            assert "secret" not in " ".join(psutil.Process(pid).cmdline())
        with redis.Redis.from_url(url.replace(":secret@", "")) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_the_broker_redis_writes_nothing_to_disk(tmp_path: Path) -> None:
    with _redis_of("redis-broker", tmp_path) as (url, _pid):
        findings = list(check_broker(Settings(BROKER_URL=url)))
        assert {finding.level for finding in findings} == {Level.OK}, findings
        with redis.Redis.from_url(url, decode_responses=True) as client:
            assert client.config_get("save") == {"save": ""}
            assert client.config_get("appendonly") == {"appendonly": "no"}
            client.set("a", "b")
    assert list(tmp_path.iterdir()) == []


def test_the_health_check_of_beat_fails_without_recent_ticks(stack: ServersOfTests) -> None:
    check = OURS["beat"]["healthcheck"]["test"]
    assert check[:3] == ["CMD", "python", "-c"]
    assert run([sys.executable, *check[2:]]).returncode == 1
    with engine().begin() as connection:
        record_tick(connection, "beat", holder="a test")
    assert run([sys.executable, *check[2:]]).returncode == 0


def test_the_worker_consumes_all_queues_for_tasks_and_its_health_check_fails_if_only_another_worker_answers(
    stack: ServersOfTests, tmp_path: Path
) -> None:
    how, *check = OURS["worker"]["healthcheck"]["test"]
    assert how == "CMD"
    how, line = OURS["system"]["healthcheck"]["test"]
    assert how == "CMD-SHELL"
    of_system = ["sh", "-c", line.replace("$$", "$").replace("-t 5", "-t 1")]
    here = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOSTNAME": socket.gethostname()}
    ready = tmp_path / "ready"
    assert OURS["worker"]["environment"]["INGEST_QUEUES"] == "${INGEST_QUEUES:-ingest}"
    variables = {"CELERIAC_READY_FILE": str(ready), "INGEST_QUEUES": "ingest,reports"}
    with running([sys.executable, *OURS["worker"]["command"][1:]], variables):
        wait_until(ready.exists, "the worker is ready")
        (consumed,) = _answer_of_worker().values()
        assert {queue["name"] for queue in consumed} == {"ingest", "reports"}
        assert run([sys.executable, *check[1:]], here).returncode == 0
        assert run(of_system, here).returncode != 0


def _answer_of_worker() -> dict[str, Any]:
    """Ask a worker which queues it consumes until it answers.

    It is ready a moment before it has subscribed to remote commands in Redis, and misses what was sent before.
    """
    answers: dict[str, Any] = {}
    wait_until(
        lambda: answers.update(app.control.inspect(timeout=2, limit=1).active_queues() or {}) or answers,
        "the worker answers",
    )
    return answers


@contextmanager
def _redis_of(name: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Start a Redis with the command of a service. Yield its address and its pid."""
    program, *options = (re.sub(r"\$\{\w+:\?.*\}", "secret", word) for word in SERVICES[name]["command"])
    assert program == "redis-server"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"redis://:secret@127.0.0.1:{port}/0"
    own = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--loglevel", "warning"]
    with running([str(find_server()), *options, *own]) as pid, redis.Redis.from_url(url) as client:
        wait_until(_answers(client), f"{name} answers")
        yield url, pid


def _answers(client: redis.Redis) -> Callable[[], bool]:
    def ask() -> bool:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False

    return ask
