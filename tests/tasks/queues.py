"""How many messages wait in a queue, on either broker."""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu import Connection, Queue


def waiting(connection: Connection, queue: Queue) -> int:
    """Declares it, too: kombu's passive declaration forgets the key prefix on Redis and finds nothing."""
    declared: Any = queue(connection.default_channel)
    return int(declared.queue_declare().message_count)


def waiting_for_work(app: Celery) -> int:
    with app.connection_for_read() as connection:
        return waiting(connection, app.amqp.queues["ingest"])
