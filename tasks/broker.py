"""Ask the broker, Redis or RabbitMQ: how many messages wait, and which workers consume which queues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from kombu.exceptions import OperationalError

import settings
from models.errors import Unreachable
from tasks.celery import app

# Of Redis, then of RabbitMQ.
TIMEOUTS: Final = ("socket_timeout", "socket_connect_timeout", "connect_timeout", "read_timeout", "write_timeout")
SHOWN_SECONDS: Final = 1.0  # patience for numbers that are shown to people or to Prometheus


def depths(queues: Iterable[str], *, patience_seconds: float | None = None) -> dict[str, int]:
    """Count the messages of each queue that no worker has taken yet. A queue that was never declared has none.

    `patience_seconds` is how long to wait for a broker that does not answer, if not as long as a worker would.
    """
    with _connection(patience_seconds) as connection:
        return {queue: _depth(connection, settings.current().broker_queue(queue)) for queue in queues}


def purge(queue: str) -> int:
    """Delete the messages that wait in a queue; return how many there were."""
    with _connection() as connection:
        try:
            return int(connection.default_channel.queue_purge(settings.current().broker_queue(queue)) or 0)
        except connection.channel_errors:
            return 0


def consumed(*, patience_seconds: float) -> dict[str, set[str]]:
    """Return the workers that answered in time, and the queues of each."""
    with _connection() as connection:  # without it, `inspect` would wait for an unreachable broker for ever
        answers = app.control.inspect(timeout=patience_seconds, connection=connection).active_queues() or {}
    prefix = settings.current().broker_queue("")
    return {worker: {queue["name"].removeprefix(prefix) for queue in queues} for worker, queues in answers.items()}


def _depth(connection: Any, queue: str) -> int:
    with connection.channel() as channel:  # RabbitMQ closes the channel if the queue does not exist
        if hasattr(channel, "_size"):  # Redis: kombu's passive declare ignores the key prefix
            return int(channel._size(queue))
        try:
            return int(channel.queue_declare(queue, passive=True).message_count)
        except connection.channel_errors:
            return 0


@contextmanager
def _connection(patience_seconds: float | None = None) -> Iterator[Any]:
    """Connect to the broker; raise Unreachable instead of the driver's errors."""
    connection: Any = app.connection_for_read(
        transport_options={} if patience_seconds is None else dict.fromkeys(TIMEOUTS, patience_seconds)
    )
    lost: tuple[type[Exception], ...] = (OperationalError, *connection.connection_errors)
    retries = 1 if patience_seconds is None else 0
    try:
        connection.ensure_connection(max_retries=retries, interval_start=0.2, timeout=patience_seconds or 5)
        yield connection
    except lost as error:
        raise Unreachable(f"The broker does not answer: {error}") from None
    finally:
        connection.release()
