"""The nodes of a test run: each made when it is first asked for, used by many tests, ended at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nodes import rabbitmq
from tests.nodes.containers import RabbitNode, RedisNode, WorkerNode

Broker = RedisNode | RabbitNode


class SharedNodes:
    """What a test has ended is started again for the next one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rabbit: rabbitmq.OwnRabbit | rabbitmq.GivenRabbit | None = None
        self._redis: RedisNode | None = None
        self._rabbit_node: RabbitNode | None = None
        self._workers: dict[str, WorkerNode] = {}

    def launch_rabbitmq(self) -> None:
        """Boots while other tests run."""
        self.rabbit = self.rabbit or rabbitmq.launch()

    def redis(self) -> RedisNode:
        if self._redis is None:
            self._redis = RedisNode(self.folder / "redis")
        self._redis.ensure_running()
        return self._redis

    def rabbitmq(self) -> RabbitNode:
        self.launch_rabbitmq()
        if self.rabbit is None:
            pytest.skip(rabbitmq.MISSING)
        if self._rabbit_node is None:
            self._rabbit_node = RabbitNode(self.rabbit)
        self._rabbit_node.ensure_running()
        return self._rabbit_node

    def worker(self, broker: Broker, *options: str, **variables: str) -> WorkerNode:
        """The worker of this broker. Only the first call decides on its options."""
        if broker.url not in self._workers:
            folder = self.folder / f"worker-of-{broker.name}"
            self._workers[broker.url] = WorkerNode(folder, *options, BROKER_URL=broker.url, **variables)
        self._workers[broker.url].ensure_running()
        return self._workers[broker.url]

    def end(self) -> None:
        for worker in self._workers.values():
            worker.process.end()
        if self._redis:
            self._redis.process.end()
        if self.rabbit:
            self.rabbit.end()
