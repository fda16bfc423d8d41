"""The publishers of the contract tests, as fixtures."""

from __future__ import annotations

from tests.outbox.publishers.http_cases import hooks, http
from tests.outbox.publishers.kafka_cases import kafka, kafka_cluster, kafka_publisher, kafka_topic, kafka_wakeups
from tests.outbox.publishers.rabbitmq_cases import amqp, celery_on_rabbitmq
from tests.outbox.publishers.redis_cases import celery, redis_stream

__all__ = [
    "amqp",
    "celery",
    "celery_on_rabbitmq",
    "hooks",
    "http",
    "kafka",
    "kafka_cluster",
    "kafka_publisher",
    "kafka_topic",
    "kafka_wakeups",
    "redis_stream",
]
