"""The nodes of a test run: each is started on first use, shared by many tests, and ended with the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedded.home import Home
from tests.nodes import rabbitmq
from tests.nodes.containers import RabbitNode, RedisNode, WorkerNode

Broker = RedisNode | RabbitNode


class SharedRabbit:
    """The RabbitMQ of a run, with virtual hosts by name."""

    def __init__(self) -> None:
        self.server: rabbitmq.OwnRabbit | rabbitmq.GivenRabbit | None = None
        self._nodes: dict[str, RabbitNode] = {}

    def launch(self) -> None:
        """Start it without waiting: that takes six seconds."""
        self.server = self.server or rabbitmq.launch()

    def vhost(self, name: str) -> RabbitNode:
        """Return the virtual host with this name."""
        self.launch()
        if self.server is None:
            pytest.skip(rabbitmq.MISSING)
        if name not in self._nodes:
            self._nodes[name] = RabbitNode(self.server)
        self._nodes[name].ensure_running()
        return self._nodes[name]

    def end(self) -> None:
        if self.server:
            self.server.end()


class SharedNodes:
    """Redis, RabbitMQ and workers. A node that a test has ended is started again for the next one."""

    def __init__(self, folder: Path, *, ledger: Home, rabbit: SharedRabbit) -> None:
        self.folder = folder
        self.ledger = ledger
        self._rabbit = rabbit
        self._redis: RedisNode | None = None
        self._workers: dict[str, WorkerNode] = {}

    @property
    def rabbit(self) -> rabbitmq.OwnRabbit | rabbitmq.GivenRabbit | None:
        return self._rabbit.server

    def redis(self) -> RedisNode:
        if self._redis is None:
            self._redis = RedisNode(self.folder / "redis")
        self._redis.ensure_running()
        return self._redis

    def rabbitmq(self) -> RabbitNode:
        return self._rabbit.vhost("workers")

    def worker(self, broker: Broker) -> WorkerNode:
        """Return a worker with two child processes, its own /metrics, and the slow tasks of the tests."""
        self._launch_worker(broker)
        if self.rabbit and self.rabbit.process.is_ready():
            self._launch_worker(self.rabbitmq())  # the next tests need it: start both at the same time
        self._workers[broker.url].ensure_running()
        return self._workers[broker.url]

    def end(self) -> None:
        for worker in self._workers.values():
            worker.process.end()
        if self._redis:
            self._redis.process.end()

    def _launch_worker(self, broker: Broker) -> None:
        if broker.url in self._workers:
            return
        role = f"worker-of-{broker.name}"
        self._workers[broker.url] = WorkerNode(
            self.folder / role,
            *("-c", "2", "-I", "tests.tasks.slow_tasks"),
            BROKER_URL=broker.url,
            CELERIAC_HOME=str(self.ledger.path),
            WORKER_RUN_TICKS="false",  # the tests run the ticks themselves
            REMAP_SIGTERM="SIGQUIT",  # as `manage.py up` starts its workers
            WORKER_METRICS_PORT=str(self.ledger.ports({role: 0}, wished={})[role]),
        )
