"""The doctor names what is wrong, and only that. Real servers are set up wrongly, and put right again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import redis
from sqlalchemy import text

import checks
import settings
from checks import ledger, project, servers, workers
from checks.result import Finding, Level
from models.engine import engine
from models.errors import Unreachable
from models.schema import head_revision, known_revisions, migrate
from settings import ROOT
from tasks.recovery.tick_rows import BEAT, record_tick
from tests.models.moving_clock import move_clock
from tests.servers import ServersOfTests


def bad(findings: Iterator[Finding]) -> dict[str, Level]:
    return {finding.name: finding.level for finding in findings if finding.level is not Level.OK}


@contextmanager
def redis_config(url: str, name: str, value: str) -> Iterator[None]:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        before = client.config_get(name)[name]
        client.config_set(name, value)
        try:
            yield
        finally:
            client.config_set(name, before)


@pytest.mark.guarantee
def test_a_receipt_redis_that_does_not_write_to_the_disk_is_named(stack: ServersOfTests) -> None:
    current = settings.current()
    assert bad(servers.check_receipts(current)) == {}
    for name, value in {
        "appendonly": "no",
        "appendfsync": "everysec",
        "no-appendfsync-on-rewrite": "yes",
        "maxmemory-policy": "allkeys-lru",
    }.items():
        with redis_config(current.redis_url, name, value):
            assert bad(servers.check_receipts(current)) == {f"receipts.{name}": Level.FAIL}
    assert bad(servers.check_receipts(current)) == {}


def test_a_broker_that_evicts_is_a_warning(stack: ServersOfTests) -> None:
    current = settings.current()
    with redis_config(current.broker_url, "maxmemory-policy", "allkeys-lru"):
        assert bad(servers.check_broker(current)) == {"broker.maxmemory-policy": Level.WARN}


@pytest.fixture
def database_setting(stack: ServersOfTests) -> Iterator[None]:
    """ALTER DATABASE … SET, which new connections get; reset afterwards."""
    yield
    with stack.cluster.superuser.begin() as connection:
        connection.execute(text(f"ALTER DATABASE {stack.cluster.migrated} RESET ALL"))


@pytest.mark.guarantee
@pytest.mark.usefixtures("database_setting")
def test_a_postgresql_that_forgets_commits_is_named(stack: ServersOfTests) -> None:
    sound = {"postgres.fsync": Level.FAIL}  # the servers of the tests run without fsync
    assert bad(ledger.check(settings.current())) == sound
    with stack.cluster.superuser.begin() as connection:
        connection.execute(text(f"ALTER DATABASE {stack.cluster.migrated} SET synchronous_commit = off"))
    found = bad(ledger.check(settings.current()))
    assert found == sound | {"postgres.synchronous_commit": Level.FAIL}


@pytest.mark.guarantee
def test_a_schema_that_is_behind_or_ahead_is_named(
    stack: ServersOfTests, empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.home.write_stack({**stack.addresses, "DATABASE_URL": empty_database})

    def schema() -> Finding:
        (finding,) = (finding for finding in ledger.check(settings.current()) if finding.name == "schema")
        return finding

    assert (schema().level, schema().remedy) == (Level.FAIL, "run `manage.py migrate`")
    migrate(engine())
    assert schema().level is Level.OK
    monkeypatch.setattr(ledger, "head_revision", lambda: "next")
    monkeypatch.setattr(ledger, "known_revisions", lambda: [*known_revisions(), "next"])
    assert schema().message == f"at {head_revision()}, this code needs next"
    with engine().begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    assert "does not know" in schema().message


def test_a_moved_clock_of_the_ledger_is_named(stack: ServersOfTests) -> None:
    with stack.cluster.superuser.begin() as connection:
        move_clock(connection, timedelta(hours=1))
    assert "ledger_clock" in bad(ledger.check(settings.current()))


def test_a_machine_whose_clock_is_wrong_is_warned(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ledger.time.time  # type: ignore[attr-defined]
    monkeypatch.setattr("checks.ledger.time.time", lambda: real() + 60)
    assert bad(ledger.check(settings.current()))["clock"] is Level.WARN


def test_silence_of_workers_is_a_fail_and_silence_of_beat_a_warning(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 0.3)
    with engine().begin() as connection:
        assert bad(workers.check(settings.current())) == {"workers": Level.FAIL, "beat": Level.WARN}
        record_tick(connection, BEAT, holder="test")
    assert bad(workers.check(settings.current())) == {"workers": Level.FAIL}
    with stack.cluster.superuser.begin() as connection:
        move_clock(connection, timedelta(minutes=1))
    assert bad(workers.check(settings.current())) == {"workers": Level.FAIL, "beat": Level.WARN}


def test_a_queue_that_nobody_consumes_is_named() -> None:
    declared = {"ingest", "system"}
    assert bad(workers._queues({"w@h": {"ingest", "system"}}, declared)) == {}
    assert bad(workers._queues({"w@h": {"ingest"}}, declared)) == {"queues": Level.FAIL}
    assert bad(workers._queues({"w@h": {"ingest", "system", "ingets"}}, declared)) == {"queues": Level.WARN}
    assert bad(workers._queues({"w@h": {"system"}}, declared, {"system"})) == {}  # the wake-ups come from Kafka


def test_somebody_elses_module_of_the_same_name_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bad(project.check(settings.current())) == {}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").write_text("")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; from checks import project; import settings; "
    )
    code += "print([(f.level.value, f.message) for f in project.check(settings.current())])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert "('fail'" in said
    assert f"tasks is {tmp_path}" in said


def test_a_misspelt_variable_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGEST_MAX_ATEMPTS", "3")
    (finding,) = [f for f in project.check(settings.current()) if f.level is Level.WARN]
    assert finding.remedy == "did you mean INGEST_MAX_ATTEMPTS?"


def test_an_unreachable_server_does_not_hide_the_other_findings(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setenv("REDIS_URL", "redis://:hunter2@127.0.0.1:1/0")
    settings.current.cache_clear()
    findings = list(checks.examine(settings.current()))
    by_name = {finding.name: finding for finding in findings}
    assert by_name["receipts"].level is Level.FAIL
    assert by_name["schema"].level is Level.OK
    assert "workers" in by_name
    assert "hunter2" not in str(findings)


def test_an_unreachable_rabbitmq_is_one_sentence_without_its_password() -> None:
    with pytest.raises(Unreachable, match=r"RabbitMQ at 127\.0\.0\.1:1 cannot be reached") as refused:
        servers._amqp("amqp://me:hunter2@127.0.0.1:1//")
    assert "hunter2" not in refused.value.message


def test_check_prints_json_and_fails_on_a_fail(stack: ServersOfTests) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "check", "--json"], capture_output=True, text=True, check=False
    )
    findings = json.loads(done.stdout)
    assert done.returncode == 1
    assert {"name": "workers", "level": "fail"}.items() <= next(f for f in findings if f["name"] == "workers").items()


@pytest.mark.guarantee
def test_the_doctor_never_faints(stack: ServersOfTests, empty_database: str) -> None:
    """An empty database and a broker that is away: exactly when a doctor is needed."""
    stack.home.write_stack({**stack.addresses, "DATABASE_URL": empty_database})
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "check", "--json"],
        env=os.environ | {"BROKER_URL": "redis://127.0.0.1:1/0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    levels = {finding["name"]: finding["level"] for finding in json.loads(done.stdout)}
    assert (levels["schema"], levels["broker"], levels["workers"]) == ("fail", "fail", "fail")
    assert levels["receipts.appendonly"] == "ok"


def test_beat_cannot_be_told_without_a_schema(stack: ServersOfTests, empty_database: str) -> None:
    stack.home.write_stack({**stack.addresses, "DATABASE_URL": empty_database})
    assert workers._beat().remedy == "run `manage.py migrate`"


def test_a_replica_is_no_place_for_receipts(stack: ServersOfTests) -> None:
    with redis.Redis.from_url(settings.current().redis_url) as client:
        client.replicaof("127.0.0.1", 1)
        try:
            assert "receipts.role" in bad(servers.check_receipts(settings.current()))
        finally:
            client.replicaof("NO", "ONE")
