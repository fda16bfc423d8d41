"""A killed child, a restarted broker and a stopped worker lose no message."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from celery import Celery

import settings
from models.engine import engine
from tasks.operations.scale import set_scale
from tests.nodes import rabbitmq
from tests.nodes.containers import RedisNode
from tests.nodes.shared import SharedNodes
from tests.servers import wait_until
from tests.tasks.celery_settings import application
from tests.tasks.held import Held
from tests.tasks.ledger import send_and_await_beat
from tests.tasks.queues import waiting_for_work


def test_the_message_of_a_killed_child_is_delivered_again(celery_setup: Any, held: Held) -> None:
    first = held.send(celery_setup.app)
    os.kill(first, signal.SIGKILL)
    second = held.started(2)
    assert second != first
    held.finish()
    assert held.finished_by == [second]


@pytest.mark.parametrize(
    "celery_broker",
    ["celery_redis_broker", pytest.param("celery_rabbitmq_broker", marks=[pytest.mark.guarantee, pytest.mark.slow])],
    indirect=True,
)
def test_a_worker_consumes_again_after_its_broker_was_restarted(celery_setup: Any) -> None:
    send_and_await_beat(celery_setup.app)
    process = celery_setup.worker.container.process
    pid = process.pid
    celery_setup.broker.restart()
    send_and_await_beat(celery_setup.app, seconds=30)
    assert (process.pid, process.status) == (pid, "running")


def test_a_larger_pool_gets_more_messages_at_once_on_every_broker(celery_setup: Any, held: Held) -> None:
    """RabbitMQ's quorum queues give a consumer no more messages than when it was registered."""
    set_scale(engine(), settings.current(), "ingest", 3, actor="a test")
    held.put(celery_setup.app, messages=3)
    held.started(3)
    set_scale(engine(), settings.current(), "ingest", None, actor="a test")
    held.finish(messages=3)
    assert len(set(held.finished_by)) == 3
    process = celery_setup.worker.container.process
    wait_until(lambda: len(psutil.Process(process.pid).children()) == 2, "the pool has its own size again")


def test_a_killed_worker_loses_no_message_and_its_metrics_folder_is_removed_later(
    celery_setup: Any, held: Held
) -> None:
    """RabbitMQ requeues a message when the connection ends, Redis after the visibility timeout, which is shortened."""
    held.send(celery_setup.app)
    worker, broker = celery_setup.worker.container, celery_setup.broker.container
    worker.kill()
    assert worker.status == "exited"
    (left,) = worker.metrics_folders()
    if isinstance(broker, RedisNode):
        assert waiting_for_work(celery_setup.app) == 0
        _let_the_visibility_timeout_pass(broker)
    worker.ensure_running()
    held.started(2)
    held.finish()
    (new,) = worker.metrics_folders()
    assert new != left


@dataclass(frozen=True, slots=True)
class Ended:
    """What a worker left behind that got SIGTERM while it ran a task."""

    after_seconds: float
    finished_by: list[int]
    metrics_folders: list[Path]


@pytest.fixture(scope="module")
def ended(nodes: SharedNodes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Stop the workers of all brokers at once: each takes the five seconds of its soft shutdown."""
    brokers = {"redis": nodes.redis()} | ({"rabbitmq": nodes.rabbitmq()} if nodes.rabbit else {})
    workers = {name: nodes.worker(broker) for name, broker in brokers.items()}
    hands = {name: Held(tmp_path_factory.mktemp(name) / "held") for name in brokers}
    seen = {}
    with ExitStack() as open_apps:
        apps = {name: open_apps.enter_context(application(broker.url)) for name, broker in brokers.items()}
        for name, app in apps.items():
            hands[name].send(app)
        asked_at = time.monotonic()
        for worker in workers.values():
            worker.kill("SIGTERM")
        ended_after = {}
        for name, worker in workers.items():
            worker.process.popen.wait(20)
            ended_after[name] = time.monotonic() - asked_at
        for name, worker in workers.items():
            await_work(apps[name])
            apps[name].control.purge()  # otherwise the worker of a later test would run it
            seen[name] = Ended(ended_after[name], hands[name].finished_by, worker.metrics_folders())
    for held in hands.values():
        held.release()
    return seen


@pytest.mark.parametrize("broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.guarantee)])
def test_a_worker_that_gets_sigterm_returns_its_message_within_seconds_and_leaves_no_folder(
    broker: str, ended: dict[str, Ended]
) -> None:
    if broker not in ended:
        pytest.skip(rabbitmq.MISSING)
    assert ended[broker].after_seconds < 10
    assert not ended[broker].finished_by
    assert not ended[broker].metrics_folders


def await_work(app: Celery) -> None:
    wait_until(lambda: waiting_for_work(app) == 1, "the message is back in the broker")


def _let_the_visibility_timeout_pass(broker: RedisNode) -> None:
    with redis.Redis.from_url(broker.url) as client:
        index = "celeriac:unacked_index"
        assert client.zcard(index) == 1
        client.zadd(index, dict.fromkeys(client.zrange(index, 0, -1), time.time() - 2 * 3600))
