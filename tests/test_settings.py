"""Every knob once; a wrong value is a sentence that names its variable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import settings
from settings import NotConfigured, Settings, SettingsError, current


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CELERIAC_HOME", str(tmp_path))
    current.cache_clear()


def test_the_defaults_are_those_of_the_design() -> None:
    values = current()
    assert (values.ingest_max_attempts, values.ingest_retry_base_backoff_ms) == (10, 1000)
    assert (values.ingest_retry_max_backoff_ms, values.ingest_lease_seconds) == (600_000, 60)
    assert (values.outbox_publish_batch_size, values.outbox_retry_jitter) == (200, 0.3)
    assert values.ingest_dlq_queue == "ingest.dlq"
    assert values.receipt_two_phase_enabled is False
    assert values.api_host == "127.0.0.1"


@pytest.mark.parametrize("field", Settings.model_fields)
def test_every_setting_has_a_meaning_and_a_canonical_name(field: str) -> None:
    assert Settings.model_fields[field].description
    assert settings.variables(field)[0].removeprefix("GIVEN_") == field.upper().removeprefix("GIVEN_")


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
def test_the_seeds_names_are_read_and_the_canonical_one_wins(
    alias: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(alias, "321")
    assert getattr(Settings(), field) == 321
    monkeypatch.setenv(settings.variables(field)[0], "654")
    assert getattr(Settings(), field) == 654


def test_the_failure_walk_of_the_seed_sets_zero_backoff_and_a_dead_letter_queue_of_its_own(
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
    assert values.ingest_lease_seconds == 1  # a lease of nothing would protect nothing
    assert values.ingest_reclaim_enabled is False
    assert values.ingest_dlq_queue == ""


def test_the_seeds_idle_time_is_milliseconds_and_yields_to_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("DATABASE_URL", "mysql://127.0.0.1/x"),
        ("REDIS_URL", "redis://127.0.0.1:door/0"),
        ("CHECKPOINT_CLAIM_IDLE_MS", "10"),
    ],
)
def test_a_bad_value_is_refused_in_a_sentence_that_names_its_variable(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as refused:
        current()
    assert name in refused.value.message
    assert refused.value.message.endswith(".")
    assert "\n" not in refused.value.message


def test_a_bad_address_does_not_show_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "mysql://me:hunter2@127.0.0.1/x")
    with pytest.raises(SettingsError) as refused:
        current()
    assert "hunter2" not in refused.value.message


def test_with_nothing_set_and_nothing_running_the_error_says_what_to_do() -> None:
    with pytest.raises(NotConfigured, match="run `make up`, or set DATABASE_URL, BROKER_URL and REDIS_URL") as missing:
        _ = current().broker_url
    assert missing.value.exit_code == 3


def test_plain_postgresql_addresses_mean_psycopg2(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in ("postgresql", "postgres", "postgresql+psycopg2"):
        monkeypatch.setenv("DATABASE_URL", f"{scheme}://u@h/d")
        assert Settings().database_url == "postgresql+psycopg2://u@h/d"


def test_what_env_printed_counts_as_not_set_even_after_a_port_has_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "secrets.json").write_text(json.dumps({"redis": "s3cret"}))
    (tmp_path / "stack.json").write_text(json.dumps({"BROKER_URL": "redis://:s3cret@127.0.0.1:2/0"}))
    monkeypatch.setenv("BROKER_URL", "redis://:s3cret@127.0.0.1:1/0")
    assert Settings().given("BROKER_URL") == ""
    assert Settings().broker_url == "redis://:s3cret@127.0.0.1:2/0"
    monkeypatch.setenv("BROKER_URL", "redis://:other@127.0.0.1:1/0")
    assert Settings().broker_url == "redis://:other@127.0.0.1:1/0"


def test_a_relative_home_is_relative_to_the_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CELERIAC_HOME", "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert Settings().home == settings.ROOT / "elsewhere"


def test_an_empty_home_means_the_default_and_not_the_project_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERIAC_HOME", "")
    assert Settings().home == settings.ROOT / ".celeriac"


@pytest.mark.parametrize("content", ["{", "null", "[1]"])
def test_a_damaged_file_of_the_home_is_a_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text(content)
    with pytest.raises(SettingsError, match="damaged"):
        _ = current().stack
