"""Settings: defaults, aliases, and error messages that name the variable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import settings
from settings import NotConfigured, Settings, SettingsError, current


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CELERIAC_HOME", str(tmp_path))
    current.cache_clear()


def test_the_api_is_closed_to_other_machines_by_default() -> None:
    assert current().api_host == "127.0.0.1"


def test_every_setting_has_a_meaning_and_every_alias_belongs_to_a_setting() -> None:
    assert [field for field, about in Settings.model_fields.items() if not about.description] == []
    assert settings.ALIASES.keys() <= Settings.model_fields.keys()


@pytest.mark.parametrize(
    ("alias", "field"),
    [
        ("INGEST_REDIS_MAX_ATTEMPTS", "ingest_max_attempts"),
        ("INGEST_REDIS_RETRY_BASE_BACKOFF_MS", "ingest_retry_base_backoff_ms"),
        ("INGEST_REDIS_RETRY_MAX_BACKOFF_MS", "ingest_retry_max_backoff_ms"),
        ("INGEST_REDIS_RECLAIM_INTERVAL_MS", "ingest_reclaim_interval_ms"),
        ("INGEST_REDIS_RECLAIM_BATCH_SIZE", "ingest_reclaim_batch_size"),
        ("INGEST_KAFKA_MAX_ATTEMPTS", "outbox_max_attempts"),
        ("INGEST_KAFKA_RETRY_BASE_BACKOFF_MS", "outbox_retry_base_backoff_ms"),
        ("INGEST_KAFKA_RETRY_MAX_BACKOFF_MS", "outbox_retry_max_backoff_ms"),
        ("INGEST_KAFKA_PUBLISH_BATCH_SIZE", "outbox_publish_batch_size"),
        ("INGEST_KAFKA_PUBLISH_INTERVAL_MS", "outbox_publish_interval_ms"),
    ],
)
def test_an_alias_is_read_and_the_canonical_name_wins(alias: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(alias, "321")
    assert getattr(Settings(), field) == 321
    monkeypatch.setenv(settings.variables(field)[0], "654")
    assert getattr(Settings(), field) == 654


# The tables of the first source document, in its order. Where a default differs from it, docs/seeds.md says why.
@pytest.mark.parametrize(
    ("variable", "default"),
    [
        ("INGEST_MAX_ATTEMPTS", 10),
        ("INGEST_RETRY_BASE_BACKOFF_MS", 1000),
        ("INGEST_RETRY_MAX_BACKOFF_MS", 600_000),
        ("INGEST_RECLAIM_ENABLED", True),
        ("INGEST_RECLAIM_INTERVAL_MS", 5000),
        ("INGEST_LEASE_SECONDS", 60),
        ("INGEST_RECLAIM_BATCH_SIZE", 500),
        ("INGEST_DLQ_QUEUE", "ingest.dlq"),
        ("OUTBOX_MAX_ATTEMPTS", 10),
        ("OUTBOX_RETRY_BASE_BACKOFF_MS", 1000),
        ("OUTBOX_RETRY_MAX_BACKOFF_MS", 600_000),
        ("OUTBOX_PUBLISH_BATCH_SIZE", 200),
        ("OUTBOX_PUBLISH_INTERVAL_MS", 1000),
    ],
)
def test_a_default_is_the_documented_one(variable: str, default: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.variables(variable.lower()):
        monkeypatch.delenv(name, raising=False)
    value = getattr(Settings(), variable.lower())
    assert (value, type(value)) == (default, type(default))


def test_aliases_accept_zero_and_empty_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "INGEST_REDIS_MAX_ATTEMPTS": "2",
        "INGEST_REDIS_RETRY_BASE_BACKOFF_MS": "0",
        "INGEST_REDIS_RETRY_MAX_BACKOFF_MS": "0",
        "INGEST_REDIS_RECLAIM_IDLE_MS": "0",
        "INGEST_REDIS_RECLAIM_ENABLED": "false",
        "INGEST_REDIS_DLQ_STREAM_KEY": "",
    }.items():
        monkeypatch.setenv(name, value)
    values = current()
    assert (values.ingest_max_attempts, values.ingest_retry_base_backoff_ms) == (2, 0)
    assert values.ingest_retry_max_backoff_ms == 0
    assert values.ingest_lease_seconds == 1  # a lease of zero seconds would protect nothing
    assert values.ingest_reclaim_enabled is False
    assert values.ingest_dlq_queue == ""


def test_the_idle_time_alias_is_in_milliseconds_and_the_lease_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGEST_REDIS_RECLAIM_IDLE_MS", "90500")
    assert Settings().ingest_lease_seconds == 91
    monkeypatch.setenv("INGEST_LEASE_SECONDS", "30")
    assert Settings().ingest_lease_seconds == 30


def test_lists_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGEST_HANDLERS", "shop.handlers, crm.handlers,")
    assert Settings().ingest_handlers == ("shop.handlers", "crm.handlers")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("INGEST_MAX_ATTEMPTS", "ten"),
        ("INGEST_MAX_ATTEMPTS", ""),
        ("INGEST_MAX_ATTEMPTS", "0"),
        ("INGEST_REDIS_RETRY_MAX_BACKOFF_MS", "-1"),
        ("INGEST_REDIS_RECLAIM_IDLE_MS", "soon"),
        ("OUTBOX_RETRY_JITTER", "1.5"),
        ("INGEST_QUEUE", "carrier-pigeon"),
        ("API_PORT", "70000"),
        ("BROKER_URL", "http://127.0.0.1:80"),
        ("BROKER_URL", "sentinel://127.0.0.1:26379"),
        ("DATABASE_URL", "mysql://127.0.0.1/x"),
        ("REDIS_URL", "redis://127.0.0.1:door/0"),
        ("CHECKPOINT_CLAIM_IDLE_MS", "10"),
    ],
)
def test_the_error_for_a_bad_value_is_one_line_that_names_the_variable(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        current()
    assert name in caught.value.message
    assert caught.value.message.endswith(".")
    assert "\n" not in caught.value.message


def test_a_bad_address_does_not_show_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "mysql://me:hunter2@127.0.0.1/x")
    with pytest.raises(SettingsError) as caught:
        current()
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize(
    ("sinks", "sentence"),
    [
        (
            {"out": {"url": "ftp://me:hunter2@h", "guarantee": "keyed"}},
            "SINKS: out: its url must begin with one of ledger:, outbox:, postgresql:, file:, redis:, rediss:, http:, "
            "https:.",
        ),
        (
            {"out": {"url": "file:///tmp", "guarantee": "keyed"}},
            "SINKS: out: a sink with a file: address has the guarantee two_phase.",
        ),
        (
            {"out": {"url": "ledger:", "guarantee": "exactly_once"}},
            "SINKS: out: guarantee: input should be 'atomic', 'keyed', 'two_phase', 'script' or 'at_least_once'.",
        ),
        (
            {"out": {"url": "ledger:", "guarantee": "atomic", "keylife": 3}},
            "SINKS: out: keylife: extra inputs are not permitted.",
        ),
        ({"Out!": {"url": "ledger:", "guarantee": "atomic"}}, "SINKS: Out!: string should match pattern"),
    ],
)
def test_a_sink_that_cannot_be_used_stops_the_start_with_a_sentence(
    sinks: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SINKS", json.dumps(sinks))
    with pytest.raises(SettingsError) as refused:
        current()
    assert refused.value.message.startswith(sentence)
    assert "hunter2" not in refused.value.message


def test_without_servers_the_error_says_how_to_get_them() -> None:
    with pytest.raises(NotConfigured, match="run `make up`, or set DATABASE_URL, BROKER_URL and REDIS_URL") as missing:
        _ = current().broker_url
    assert missing.value.exit_code == 3


def test_every_postgresql_address_uses_psycopg2(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in ("postgresql", "postgres", "postgresql+psycopg2"):
        monkeypatch.setenv("DATABASE_URL", f"{scheme}://u@h/d")
        assert Settings().database_url == "postgresql+psycopg2://u@h/d"


def test_an_address_printed_by_env_does_not_override_the_stack_after_its_port_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "secrets.json").write_text(json.dumps({"redis": "s3cret"}))
    (tmp_path / "stack.json").write_text(json.dumps({"BROKER_URL": "redis://:s3cret@127.0.0.1:2/0"}))
    monkeypatch.setenv("BROKER_URL", "redis://:s3cret@127.0.0.1:1/0")
    assert Settings().given("BROKER_URL") == ""
    assert Settings().broker_url == "redis://:s3cret@127.0.0.1:2/0"
    monkeypatch.setenv("BROKER_URL", "redis://:other@127.0.0.1:1/0")
    assert Settings().broker_url == "redis://:other@127.0.0.1:1/0"


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg2"])
def test_another_database_on_the_embedded_server_is_not_ignored(
    scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "secrets.json").write_text(json.dumps({"postgres": "s3cret", "postgres_superuser": "r00t"}))
    ours = "postgresql://celeriac:s3cret@127.0.0.1:1/celeriac"
    (tmp_path / "stack.json").write_text(json.dumps({"DATABASE_URL": ours}))
    printed = ours.replace("postgresql", scheme)
    for given, is_ours in {
        printed: True,
        printed.replace(":1/", ":2/"): True,  # printed before a restart
        printed.replace("/celeriac", "/shop"): False,
        printed.replace("//celeriac:s3cret", "//postgres:r00t"): False,
        printed.replace("s3cret", "other"): False,
        printed.replace("127.0.0.1", "db.example"): False,
        f"{printed}?sslmode=require": False,
    }.items():
        monkeypatch.setenv("DATABASE_URL", given)
        assert Settings().given("DATABASE_URL") == ("" if is_ours else given)


@pytest.mark.parametrize("given", ["redis://:s3cret@127.0.0.1:1/5", "rediss://:s3cret@127.0.0.1:1/0"])
def test_another_database_on_the_embedded_redis_is_not_ignored(
    given: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "secrets.json").write_text(json.dumps({"redis": "s3cret"}))
    monkeypatch.setenv("BROKER_URL", given)
    assert Settings().given("BROKER_URL") == given


def test_a_relative_home_is_relative_to_the_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CELERIAC_HOME", "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert Settings().home == settings.ROOT / "elsewhere"


def test_an_empty_home_means_the_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERIAC_HOME", "")
    assert Settings().home == settings.ROOT / ".celeriac"


@pytest.mark.parametrize("content", ["{", "null", "[1]"])
def test_a_damaged_stack_file_is_reported_in_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text(content)
    with pytest.raises(SettingsError, match="damaged"):
        _ = current().stack
