"""A receipt log of its own for tests that kill, suspend, fill or misconfigure it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from child_process import ChildProcess
from embedded.home import Home
from embedded.program import Program
from embedded.redis import RECEIPTS, Redis
from tests.outbox.publishers.case import stopped

ROLE = "redis-under-test"


class LogServer:
    """A Redis server with the configuration of the receipt log."""

    def __init__(self, home: Home) -> None:
        self.home = home
        (port,) = home.ports({ROLE: 0}, wished={}).values()
        self.redis = Redis(home, ROLE, port, RECEIPTS)
        self.url = self.redis.url
        self.child: ChildProcess | None = None

    def start(self) -> None:
        """Start it; what it has written before is there again."""
        program = Program(ROLE, self.redis.command, prepare=self.redis.prepare, is_ready=self.redis.is_ready)
        self.child = program.start(self.home)
        self.child.await_ready(20)

    def kill(self) -> None:
        """End it with SIGKILL."""
        assert self.child is not None
        self.child.kill()
        self.child = None

    @contextmanager
    def killed(self) -> Iterator[None]:
        self.kill()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Suspend it: it accepts connections and does not answer."""
        assert self.child is not None
        with stopped(self.child.process):
            yield

    @contextmanager
    def configured(self, name: str, value: str) -> Iterator[None]:
        """Change a setting while it runs."""
        with self.client() as client:
            before = client.config_get(name)[name]
            client.config_set(name, value)
        yield
        with self.client() as client:
            client.config_set(name, before)

    def client(self) -> Any:
        return redis.Redis.from_url(self.url, decode_responses=True)
