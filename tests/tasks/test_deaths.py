"""Whoever dies, the work goes on: a child, a worker, a broker."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import redis

from tests.nodes.containers import RedisNode
from tests.servers import wait_until
from tests.tasks.held import Held
from tests.tasks.ledger import send_and_await_beat
from tests.tasks.queues import waiting_for_work


def test_the_message_of_a_killed_child_is_worked_on_again(celery_setup: Any, held: Held) -> None:
    first = held.send(celery_setup.app)
    os.kill(first, signal.SIGKILL)
    second = held.started(2)
    assert second != first
    held.finish()
    assert held.finished_by == [second]


def test_a_worker_that_was_killed_with_a_message_in_hand_loses_nothing_and_its_folder_is_swept(celery_setup: Any, held: Held) -> None:
    """RabbitMQ gives it back when the connection ends, Redis when the visibility timeout is over: we move its clock."""
    held.send(celery_setup.app)
    worker, broker = celery_setup.worker.container, celery_setup.broker.container
    worker.kill()
    assert worker.status == "exited"
    left = worker.metrics_folders()
    assert len(left) == 1
    if isinstance(broker, RedisNode):
        assert waiting_for_work(celery_setup.app) == 0
        _let_visibility_timeouts_pass(broker)
    worker.ensure_running()
    held.started(2)
    held.finish()
    assert len(worker.metrics_folders()) == 1, "a new one, and the old one is swept"
    assert worker.metrics_folders() != left


def test_sigterm_gives_the_message_in_hand_back_within_seconds(celery_setup: Any, held: Held) -> None:
    held.send(celery_setup.app)
    worker = celery_setup.worker.container
    asked_at = time.monotonic()
    worker.kill("SIGTERM")
    worker.process.popen.wait(20)
    assert time.monotonic() - asked_at < 10
    assert not held.finished_by
    wait_until(lambda: waiting_for_work(celery_setup.app) == 1, "the message is back")
    assert not worker.metrics_folders()


def test_a_worker_consumes_again_after_its_broker_was_restarted(celery_setup: Any) -> None:
    send_and_await_beat(celery_setup.app)
    pid = celery_setup.worker.container.process.pid
    celery_setup.broker.restart()
    send_and_await_beat(celery_setup.app, seconds=30)
    assert celery_setup.worker.container.process.pid == pid
    assert celery_setup.worker.container.status == "running"


def _let_visibility_timeouts_pass(broker: RedisNode) -> None:
    with redis.Redis.from_url(broker.url) as client:
        index = "celeriac:unacked_index"
        assert client.zcard(index) == 1
        client.zadd(index, dict.fromkeys(client.zrange(index, 0, -1), time.time() - 2 * 3600))
