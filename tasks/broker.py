"""Ask the broker, Redis or RabbitMQ: how many messages wait, and which workers consume which queues."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from kombu.exceptions import OperationalError

import settings
from models.errors import Unreachable
from models.process_singleton import OnePerProcess
from tasks.celery import app

# Of Redis, then of RabbitMQ.
TIMEOUTS: Final = ("socket_timeout", "socket_connect_timeout", "connect_timeout", "read_timeout", "write_timeout")
SHOWN_SECONDS: Final = 1.0  # patience for numbers that are shown to people or to Prometheus
WORKER_SECONDS: Final = 0.5  # patience of a worker, which has other work to do


def depths(queues: Iterable[str], *, patience_seconds: float | None = None) -> dict[str, int]:
    """Count the messages of each queue that no worker has taken yet. A queue that was never declared has none.

    `patience_seconds` is how long to wait for a broker that does not answer, if not as long as a worker would.
    """
    with _connection(patience_seconds) as connection:
        return _depths(connection, queues)


def is_empty(queue: str) -> bool:
    """Return whether no message waits in a queue. An unreachable broker has none to give.

    For workers, which ask often: the connection is kept, and an unreachable broker is asked once in some seconds.
    """
    return _look().is_empty(queue)


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


class Look:
    """A connection to look at queues, which all threads of this process share."""

    AGAIN_SECONDS: Final = 5.0  # after the broker was unreachable

    def __init__(self, current: settings.Settings) -> None:
        self.settings = current
        self._lost: tuple[type[BaseException], ...] = (OperationalError, *app.connection_for_read().connection_errors)
        self._lock = threading.Lock()
        self._connection: Any = None
        self._ask_at = 0.0

    def is_empty(self, queue: str) -> bool:
        with self._lock:
            if time.monotonic() < self._ask_at:
                return True
            try:
                if self._connection is None:
                    self._connection = self._connect()
                return _depths(self._connection, [queue])[queue] == 0
            except self._lost:
                self._ask_at = time.monotonic() + self.AGAIN_SECONDS
                self.close()
                return True

    def _connect(self) -> Any:
        connection: Any = app.connection_for_read(transport_options=dict.fromkeys(TIMEOUTS, WORKER_SECONDS))
        connection.ensure_connection(max_retries=0, timeout=WORKER_SECONDS)
        return connection

    def close(self) -> None:
        if self._connection is not None:
            with suppress(*self._lost):
                self._connection.release()
            self._connection = None


_look: Final = OnePerProcess(Look)


def _depths(connection: Any, queues: Iterable[str]) -> dict[str, int]:
    names = {queue: settings.current().broker_queue(queue) for queue in queues}
    with connection.channel() as channel:
        if hasattr(channel, "_size"):  # Redis: kombu's passive declare ignores the key prefix
            return {queue: int(channel._size(name)) for queue, name in names.items()}
    return {queue: _declared_depth(connection, name) for queue, name in names.items()}


def _declared_depth(connection: Any, queue: str) -> int:
    with connection.channel() as channel:  # RabbitMQ closes the channel if the queue does not exist
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
