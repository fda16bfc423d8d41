"""The settings that keep the promises, and why each is as it is: a change here should be a decision."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from settings import ROOT
from tests.tasks.celery_settings import celery_settings

BROKERS = {"redis": "redis://127.0.0.1:1/0", "amqp": "amqp://127.0.0.1:1//"}
ALWAYS = {
    "accept_content": ["json"],
    "result_accept_content": ["json"],
    "task_serializer": "json",
    "event_serializer": "json",
    "task_ignore_result": True,
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    "worker_prefetch_multiplier": 1,
    "worker_cancel_long_running_tasks_on_connection_loss": False,
    "broker_connection_retry": True,
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    "broker_channel_error_retry": True,
    "task_create_missing_queues": False,
    "beat_scheduler": "celery.beat:Scheduler",
}


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def config(broker: str) -> dict[str, Any]:
    return celery_settings(BROKERS[broker])


def test_what_keeps_messages_safe_is_set_for_every_broker(config: dict[str, Any]) -> None:
    assert {name: config[name] for name in ALWAYS} == ALWAYS
    assert 0 < config["worker_soft_shutdown_timeout"] < 10  # Docker kills after ten
    assert "result_backend" not in config


def test_what_belongs_to_one_broker_is_set_for_that_one(broker: str, config: dict[str, Any]) -> None:
    options = config["broker_transport_options"]
    if broker == "redis":
        assert config["task_soft_time_limit"] < config["task_time_limit"] < options["visibility_timeout"]
        assert options["global_keyprefix"]
        assert options["unacked_restore_interval"] * options["unacked_restore_throttle"] <= 10
        assert options["health_check_interval"] < options["socket_timeout"]
    else:
        assert options["confirm_publish"] is True
        assert options["read_timeout"] >= 2 * config["broker_heartbeat"]
        assert {queue.queue_arguments["x-queue-type"] for queue in config["task_queues"]} == {"quorum"}


def test_work_and_ticks_are_apart_and_dead_letters_are_nowhere(config: dict[str, Any]) -> None:
    queues = {queue.name: queue for queue in config["task_queues"]}
    assert set(queues) == {"ingest", "system"}
    assert all(queue.routing_key == name and queue.durable for name, queue in queues.items())


def test_no_tick_outlives_the_next_one(config: dict[str, Any]) -> None:
    for entry in config["beat_schedule"].values():
        assert 0 < entry["options"]["expires"] <= entry["schedule"]


def test_every_setting_says_why() -> None:
    source = (ROOT / "celeryconfig.py").read_text()
    lines = source.splitlines()
    silent = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, first = node.targets[0].id, node.lineno - 1
            assert node.end_lineno
            explained = any("#" in line for line in lines[first - 1 : node.end_lineno])
            silent += [] if explained or name.startswith("_") else [name]
            if name == "broker_transport_options":
                silent += [line.strip() for line in lines[first + 1 : node.end_lineno - 1] if "#" not in line]
    assert not silent
