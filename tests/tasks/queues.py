"""Count the messages of a queue, on Redis or RabbitMQ."""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu import Connection, Queue


def waiting(connection: Connection, queue: Queue) -> int:
    """Declare the queue and count its messages: kombu's passive declaration ignores the key prefix on Redis."""
    declared: Any = queue(connection.default_channel)
    return int(declared.queue_declare().message_count)


def waiting_for_work(app: Celery) -> int:
    with app.connection_for_read() as connection:
        return waiting(connection, app.amqp.queues["ingest"])
