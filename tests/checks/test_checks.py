"""`manage.py check` reports what is wrong and nothing else. The tests misconfigure real servers and restore them."""

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
from checks import consumer_timeout, destinations, ledger, project, servers, workers
from checks.result import Finding, Level
from models.engine import engine
from models.errors import Unreachable
from models.schema import head_revision, known_revisions, migrate
from models.sql import sql
from settings import ROOT
from tasks.core.registry import handlers
from tasks.recovery.tick_rows import BEAT, record_tick
from tests.models.moving_clock import move_clock
from tests.servers import ServersOfTests
from tests.tasks.command_line import buried
from tests.tasks.deliveries import handled
from tests.tasks.registrations import handler_of, registered


def problems(findings: Iterator[Finding]) -> dict[str, Level]:
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


def test_a_destination_that_cannot_be_used_fails_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {
        "crm": "https://h/x?secret=hunter2",
        "open": "http://h/hunter2",
        "stream": "redis-stream://:hunter2@h/0",
        "odd": "nonsense:hunter2",
    }
    monkeypatch.setenv("OUTBOX_DESTINATIONS", json.dumps(addresses))
    settings.current.cache_clear()
    found = list(destinations.check(settings.current()))
    settings.current.cache_clear()
    assert problems(iter(found)) == {f"destination.{name}": Level.FAIL for name in ("open", "stream", "odd")}
    assert "hunter2" not in str(found)
    assert destinations.check in [check for _, check in checks.CHECKS]


@pytest.mark.parametrize("program", [["manage.py", "check"], ["-m", "uvicorn", "api.app:app", "--port=0"]], ids=str)
def test_an_ftp_destination_is_refused_at_the_start_with_one_sentence(
    stack: ServersOfTests, program: list[str]
) -> None:
    given = {"OUTBOX_DESTINATIONS": json.dumps({"files": "ftp://u:hunter2@h/x"})}
    command = [sys.executable, *program]
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=os.environ | given, capture_output=True, text=True, timeout=60
    )
    assert done.returncode not in (0, None)
    assert "OUTBOX_DESTINATIONS: the address of 'files' must begin with one of https://, http://" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "hunter2" not in done.stderr + done.stdout


@pytest.mark.guarantee
def test_a_receipt_redis_that_may_lose_writes_fails(stack: ServersOfTests) -> None:
    current = settings.current()
    assert problems(servers.check_receipts(current)) == {}
    for name, value in {
        "appendonly": "no",
        "appendfsync": "everysec",
        "no-appendfsync-on-rewrite": "yes",
        "maxmemory-policy": "allkeys-lru",
    }.items():
        with redis_config(current.redis_url, name, value):
            assert problems(servers.check_receipts(current)) == {f"receipts.{name}": Level.FAIL}
    assert problems(servers.check_receipts(current)) == {}


def test_a_broker_that_evicts_is_a_warning(stack: ServersOfTests) -> None:
    current = settings.current()
    with redis_config(current.broker_url, "maxmemory-policy", "allkeys-lru"):
        assert problems(servers.check_broker(current)) == {"broker.maxmemory-policy": Level.WARN}


@pytest.fixture
def database_setting(stack: ServersOfTests) -> Iterator[None]:
    """Reset the settings that the test gave the database with ALTER DATABASE … SET."""
    yield
    with stack.cluster.superuser.begin() as connection:
        connection.execute(text(f"ALTER DATABASE {stack.cluster.migrated} RESET ALL"))


@pytest.mark.guarantee
@pytest.mark.usefixtures("database_setting")
def test_a_postgresql_that_may_lose_commits_fails(stack: ServersOfTests) -> None:
    expected = {"postgres.fsync": Level.FAIL}  # the test servers run without fsync
    assert problems(ledger.check(settings.current())) == expected
    with stack.cluster.superuser.begin() as connection:
        connection.execute(text(f"ALTER DATABASE {stack.cluster.migrated} SET synchronous_commit = off"))
    found = problems(ledger.check(settings.current()))
    assert found == expected | {"postgres.synchronous_commit": Level.FAIL}


@pytest.mark.guarantee
def test_a_schema_older_or_newer_than_the_code_fails(
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
    assert schema().message == f"is at {head_revision()}, this code needs next"
    with engine().begin() as connection:
        connection.execute(text("UPDATE celeriac.celeriac_version SET version_num = '9999'"))
    assert "does not know" in schema().message


def test_a_shifted_clock_of_the_ledger_fails(stack: ServersOfTests) -> None:
    with stack.cluster.superuser.begin() as connection:
        move_clock(connection, timedelta(hours=1))
    assert "ledger_clock" in problems(ledger.check(settings.current()))


def test_a_machine_with_a_wrong_clock_is_a_warning(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ledger.time.time  # type: ignore[attr-defined]
    monkeypatch.setattr("checks.ledger.time.time", lambda: real() + 60)
    assert problems(ledger.check(settings.current()))["clock"] is Level.WARN


def test_missing_workers_fail_and_a_missing_beat_is_a_warning(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 0.3)
    with engine().begin() as connection:
        assert problems(workers.check(settings.current())) == {"workers": Level.FAIL, "beat": Level.WARN}
        record_tick(connection, BEAT, holder="test")
    assert problems(workers.check(settings.current())) == {"workers": Level.FAIL}
    with stack.cluster.superuser.begin() as connection:
        move_clock(connection, timedelta(minutes=1))
    assert problems(workers.check(settings.current())) == {"workers": Level.FAIL, "beat": Level.WARN}


def test_every_problem_with_the_workers_reaches_the_report(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that is not called finds nothing, and the report would look well."""
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setenv("BROKER_URL", "amqp://127.0.0.1:1//")
    monkeypatch.setattr(consumer_timeout, "PORT", 1)
    registered(handlers())
    buried(3)  # without dead letters
    with engine().begin() as connection:
        connection.execute(sql("SELECT ledger.ingest_submit('un.known', '{}')"))
        connection.execute(
            sql("INSERT INTO ledger.tick (name, holder, error) VALUES ('prune', 'test', 'no space left')")
        )
    with handled("test.hours", lambda _task: None, transactional=False, soft_limit_seconds=7200):
        found = list(workers.check(settings.Settings()))
    assert problems(iter(found)) == {
        "workers": Level.FAIL,
        "types": Level.WARN,
        "beat": Level.WARN,
        "tick.prune": Level.FAIL,
        "dead letters": Level.WARN,
    }
    assert [each.name for each in found if each.level is Level.OK] == ["handlers.limits"]


def test_a_queue_without_a_worker_fails() -> None:
    declared = {"ingest", "system"}
    assert problems(workers._check_queues({"w@h": {"ingest", "system"}}, declared)) == {}
    assert problems(workers._check_queues({"w@h": {"ingest"}}, declared)) == {"queues": Level.FAIL}
    assert problems(workers._check_queues({"w@h": {"ingest", "system", "ingets"}}, declared)) == {"queues": Level.WARN}
    assert problems(workers._check_queues({"w@h": {"system"}}, declared, {"system"})) == {}  # Kafka carries the others


def test_a_waiting_type_that_no_live_worker_knows_is_a_warning_that_names_it(stack: ServersOfTests) -> None:
    with engine().begin() as connection:
        connection.execute(
            sql("SELECT ledger.ingest_submit('demo.flaky', '{}'), ledger.ingest_submit('un.known', '{}')")
        )
    registered(handlers())
    (finding,) = workers._check_types()
    assert (finding.name, finding.level) == ("types", Level.WARN)
    assert finding.message == "tasks of the type un.known wait in ingest, and no live worker knows it there"
    registered(handler_of("un.known"), name="another:2")
    assert [each.level for each in workers._check_types()] == [Level.OK]


def test_a_foreign_module_with_one_of_our_names_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(project.check(settings.current())) == {}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").write_text("")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; from checks import project; import settings; "
    )
    code += "print([(f.level.value, f.message) for f in project.check(settings.current())])"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    assert "('fail'" in output
    assert f"tasks is {tmp_path}" in output


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
    findings = list(checks.run_checks(settings.current()))
    by_name = {finding.name: finding for finding in findings}
    assert by_name["receipts"].level is Level.FAIL
    assert by_name["schema"].level is Level.OK
    assert "workers" in by_name
    assert "hunter2" not in str(findings)


def test_the_error_of_an_unreachable_rabbitmq_hides_its_password() -> None:
    with pytest.raises(Unreachable, match=r"RabbitMQ at 127\.0\.0\.1:1 is unreachable") as caught:
        servers._check_amqp("amqp://me:hunter2@127.0.0.1:1//")
    assert "hunter2" not in caught.value.message


def test_check_prints_json_and_exits_with_1_on_a_failure(stack: ServersOfTests) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "check", "--json"], capture_output=True, text=True, check=False
    )
    findings = json.loads(done.stdout)
    assert done.returncode == 1
    assert {"name": "workers", "level": "fail"}.items() <= next(f for f in findings if f["name"] == "workers").items()


@pytest.mark.guarantee
def test_check_reports_everything_with_an_empty_database_and_no_broker(
    stack: ServersOfTests, empty_database: str
) -> None:
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


def test_beat_cannot_be_checked_without_a_schema(stack: ServersOfTests, empty_database: str) -> None:
    stack.home.write_stack({**stack.addresses, "DATABASE_URL": empty_database})
    assert workers._check_beat().remedy == "run `manage.py migrate`"


def test_a_replica_cannot_store_receipts(stack: ServersOfTests) -> None:
    with redis.Redis.from_url(settings.current().redis_url) as client:
        client.replicaof("127.0.0.1", 1)
        try:
            assert "receipts.role" in problems(servers.check_receipts(settings.current()))
        finally:
            client.replicaof("NO", "ONE")


@pytest.mark.parametrize(("broker", "reported"), [("amqp://127.0.0.1:1//", ["ok"]), ("redis://127.0.0.1:1/0", [])])
def test_a_handler_that_outlives_the_consumer_timeout_is_mentioned_and_is_no_problem(
    broker: str, reported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_URL", broker)
    monkeypatch.setattr(consumer_timeout, "PORT", 1)
    with handled("test.hours", lambda _task: None, transactional=False, soft_limit_seconds=7200):
        found = list(workers._check_long_handlers(settings.Settings()))
    assert [finding.level for finding in found] == reported
    assert all("test.hours may run for longer" in finding.message for finding in found)
