"""pytest-celery's containers, with a local process instead of Docker. pytest-celery has no types."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

from pytest_celery import (  # type: ignore[import-untyped]
    CeleryTestWorker,
    CeleryWorkerContainer,
    RabbitMQContainer,
    RedisContainer,
)

from embedded.home import Home
from embedded.redis import BROKER, Redis
from settings import ROOT
from tests.nodes.process import LocalProcess
from tests.nodes.programs import celery, environment
from tests.nodes.rabbitmq import GivenRabbit, OwnRabbit


class _Local:
    """A node that several tests share. Its creator ends it, so `teardown` does nothing."""

    process: LocalProcess | GivenRabbit

    def ready(self) -> bool:
        self.process.await_ready()
        return True

    def teardown(self) -> None:
        pass

    def ensure_running(self) -> None:
        """Start the process again if a test has ended it."""
        if self.process.status == "exited":
            self.process.end()
            self.process.start()
        self.ready()


class RedisNode(_Local, RedisContainer):  # type: ignore[misc]
    """A Redis configured as in the embedded stack, in a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder)
        self.home.create()
        self.server = Redis(self.home, "redis-broker", self.home.ports({"broker": 0}, wished={})["broker"], BROKER)
        self.process = LocalProcess(
            self.server.command,
            folder=folder,
            cwd=folder,
            environment=environment(),
            is_ready=self.server.is_ready,
            before_start=self.server.prepare,
        )
        super().__init__(self.process)

    @property
    def url(self) -> str:
        return self.server.url

    host_url = url

    @property
    def port(self) -> int:
        return self.server.port


class RabbitNode(_Local, RabbitMQContainer):  # type: ignore[misc]
    """One virtual host of the RabbitMQ of this test run."""

    def __init__(self, rabbit: OwnRabbit | GivenRabbit) -> None:
        self.process = rabbit.process
        self.process.await_ready(60)
        self.management_port = rabbit.management_port
        self._url = rabbit.url()
        super().__init__(self.process)

    @property
    def url(self) -> str:
        return self._url

    host_url = url

    @property
    def port(self) -> int:
        return urlsplit(self._url).port or 5672

    @property
    def vhost(self) -> str:
        return urlsplit(self._url).path[1:]


class WorkerNode(_Local, CeleryWorkerContainer):  # type: ignore[misc]
    """`celery -A tasks worker` with its own folder for temporary files."""

    process: LocalProcess

    def __init__(self, folder: Path, *options: str, **variables: str) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.process = LocalProcess(
            [*celery("-A", "tasks", "worker"), *options],
            folder=folder,
            cwd=ROOT,
            environment=environment(TMPDIR=str(self.temporary), **variables),
        )
        super().__init__(self.process)

    def metrics_folders(self) -> list[Path]:
        return list(self.temporary.glob("celeriac-metrics-*"))

    @classmethod
    def worker_name(cls) -> str:
        return "celery"

    @classmethod
    def worker_queue(cls) -> str:
        return "ingest"


class LocalTestWorker(CeleryTestWorker):  # type: ignore[misc]
    """A worker whose host name is that of this machine."""

    def hostname(self) -> str:
        return f"{self.worker_name}@{socket.gethostname()}"
