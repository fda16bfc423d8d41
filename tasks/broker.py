"""What the broker holds, how to empty it, and who consumes it. Redis and RabbitMQ alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kombu.exceptions import OperationalError

from models.errors import Unreachable
from tasks.celery import app


def depths(queues: Iterable[str]) -> dict[str, int]:
    """Messages that no worker has taken yet. A queue that was never declared is empty."""
    with _connection() as connection:
        return {queue: _depth(connection, queue) for queue in queues}


def purge(queue: str) -> int:
    """Throw away what waits in a queue; returns how much it was."""
    with _connection() as connection:
        try:
            return int(connection.default_channel.queue_purge(queue) or 0)
        except connection.channel_errors:
            return 0


def consumed(*, patience_seconds: float) -> dict[str, set[str]]:
    """Workers that answered in time, and the queues of each."""
    with _connection() as connection:  # which knows when to give up; left to itself, `inspect` does not
        answers = app.control.inspect(timeout=patience_seconds, connection=connection).active_queues() or {}
    return {worker: {queue["name"] for queue in queues} for worker, queues in answers.items()}


def _depth(connection: Any, queue: str) -> int:
    with connection.channel() as channel:  # a queue that is not there costs the channel its life
        if hasattr(channel, "_size"):  # Redis: kombu's passive declare forgets the prefix of the keys
            return int(channel._size(queue))
        try:
            return int(channel.queue_declare(queue, passive=True).message_count)
        except connection.channel_errors:
            return 0


@contextmanager
def _connection() -> Iterator[Any]:
    """A broker that is away is a sentence."""
    connection: Any = app.connection_for_read()
    lost: tuple[type[Exception], ...] = (OperationalError, *connection.connection_errors)
    try:
        connection.ensure_connection(max_retries=1, interval_start=0.2, timeout=5)
        yield connection
    except lost as error:
        raise Unreachable(f"The broker does not answer: {error}") from None
    finally:
        connection.release()
