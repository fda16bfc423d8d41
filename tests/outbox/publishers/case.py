"""What the contract tests need of a publisher: how to make it, how to stop its server, and what has arrived."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from child_process import OwnProcess
from outbox.lease import ClaimedEvent
from outbox.publishers.contract import Publisher
from tests.servers import wait_until


@dataclass
class Case:
    """A publisher and its real server."""

    publisher: Publisher
    unreachable: Callable[[], Publisher]  # the same kind, at an address without a server
    hanging: Callable[[], AbstractContextManager[None]]  # the server accepts connections and does not answer
    arrived: Callable[[], list[Any]]  # the names given to `events` that the server has received
    keeps_order: bool = True  # within one batch


def events(*names: str) -> list[ClaimedEvent]:
    """Return the events of one batch. Each name is the only id in its payload."""
    return [
        ClaimedEvent(n, "d", {"type": "t", "ids": [name], "batch": 100}, None, {}, 0, uuid.uuid4(), datetime.now(UTC))
        for n, name in enumerate(names, start=1)
    ]


@contextmanager
def stopped(server: OwnProcess) -> Iterator[None]:
    """Freeze a server: it accepts connections and does not answer."""
    server.send_signal(signal.SIGSTOP)
    wait_until_stopped(psutil.Process(server.pid))
    try:
        yield
    finally:
        server.send_signal(signal.SIGCONT)


def wait_until_stopped(process: psutil.Process) -> None:
    """Wait until SIGSTOP has reached all threads of a process: one that still runs could answer a request."""

    def is_stopped() -> bool:
        states = [
            file.read_text().rpartition(")")[2].split()[0] for file in Path("/proc").glob(f"{process.pid}/task/*/stat")
        ]
        return set(states) == {"T"} if states else process.status() == psutil.STATUS_STOPPED  # without /proc on macOS

    wait_until(is_stopped, f"all threads of process {process.pid} are stopped")
