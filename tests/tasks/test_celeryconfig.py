"""Relations between Celery's settings that must hold for both brokers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tasks.celery_settings import celery_settings

BROKERS = {"redis": "redis://127.0.0.1:1/0", "amqp": "amqp://127.0.0.1:1//"}


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def config(broker: str) -> dict[str, Any]:
    return celery_settings(BROKERS[broker])


def test_a_worker_shuts_down_before_docker_kills_it(config: dict[str, Any]) -> None:
    assert 0 < config["worker_soft_shutdown_timeout"] < 10


def test_celery_kills_no_handler_that_was_promised_more_time(config: dict[str, Any]) -> None:
    assert config["task_time_limit"] is config["task_soft_time_limit"] is None


def test_a_silent_broker_is_detected_before_a_read_times_out(broker: str, config: dict[str, Any]) -> None:
    options = config["broker_transport_options"]
    if broker == "redis":
        assert options["health_check_interval"] < options["socket_timeout"]
    else:
        assert options["read_timeout"] >= 2 * config["broker_heartbeat"]


def test_ticks_have_a_queue_of_their_own_and_a_worker_does_not_consume_dead_letters(config: dict[str, Any]) -> None:
    queues = {queue.name: queue for queue in config["task_queues"]}
    assert set(queues) == {"ingest", "system", "receipts"}
    assert all(queue.routing_key == name and queue.durable for name, queue in queues.items())


def test_a_tick_expires_before_the_next_one_is_sent(config: dict[str, Any]) -> None:
    for entry in config["beat_schedule"].values():
        assert 0 < entry["options"]["expires"] <= entry["schedule"]


def test_beat_sends_the_ticks_at_the_intervals_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule() -> dict[str, float]:
        entries: dict[str, Any] = celery_settings(BROKERS["redis"])["beat_schedule"]
        return {name: entries[name]["schedule"] for name in ("relay", "reclaim")}

    assert schedule() == {"relay": 1.0, "reclaim": 5.0}
    monkeypatch.setenv("OUTBOX_PUBLISH_INTERVAL_MS", "250")
    monkeypatch.setenv("INGEST_RECLAIM_INTERVAL_MS", "7500")
    assert schedule() == {"relay": 0.25, "reclaim": 7.5}
