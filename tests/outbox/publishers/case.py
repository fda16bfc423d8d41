"""What the conformance suite needs to know of a publisher: how to make it, how to hurt its server, what has arrived."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psutil

from embedded.process import Process
from outbox.lease import ClaimedEvent
from outbox.publishers.contract import Publisher
from tests.servers import wait_until


@dataclass
class Case:
    """A publisher and its real server."""

    publisher: Publisher
    unreachable: Callable[[], Publisher]  # the same kind, at an address where nobody listens
    hanging: Callable[[], AbstractContextManager[None]]  # the server takes connections and answers nothing
    arrived: Callable[[], list[Any]]  # the names given to `events`, as the server has them
    keeps_order: bool = True  # within one batch


def events(*names: str) -> list[ClaimedEvent]:
    """Events of one batch; the name is the payload's only id."""
    return [
        ClaimedEvent(n, "d", {"type": "t", "ids": [name], "batch": 100}, None, {}, 0, uuid.uuid4(), datetime.now(UTC))
        for n, name in enumerate(names, start=1)
    ]


@contextmanager
def stopped(server: Process) -> Iterator[None]:
    server.ask_to_end(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(server.pid).status() == psutil.STATUS_STOPPED, "all its threads stand still")
    try:
        yield
    finally:
        server.ask_to_end(signal.SIGCONT)
