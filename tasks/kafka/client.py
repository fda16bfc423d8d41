"""Create consumers of KAFKA_TOPIC in the group of the workers."""

from __future__ import annotations

from typing import Any, Final

from confluent_kafka import Consumer, KafkaException

from outbox.publishers.kafka import librdkafka
from settings import Settings, SettingsError

DEFAULTS: Final = {
    "client.id": "celeriac",
    "auto.offset.reset": "earliest",  # a new group, or one that lost its offsets, misses no record
    "partition.assignment.strategy": "cooperative-sticky",  # a worker that joins or leaves moves few partitions
    "session.timeout.ms": "10000",  # after this, other workers get the partitions of a killed one
    "heartbeat.interval.ms": "2000",
    "topic.metadata.refresh.interval.ms": "10000",  # so that a topic created later is found
    "fetch.wait.max.ms": "100",  # an idle partition must not delay others on the same broker
    "log.connection.close": "false",  # brokers close idle connections
}


def make_consumer(settings: Settings, **ours: Any) -> Consumer:
    """Create a consumer. `ours` override KAFKA_OPTIONS, which override the defaults. Raise SettingsError."""
    options = {name: value.get_secret_value() for name, value in settings.kafka_options.items()}
    fixed = {
        "bootstrap.servers": settings.kafka_bootstrap_servers,
        "group.id": settings.kafka_group,
        "enable.auto.commit": "false",  # we commit an offset after the claim of its tasks
        "enable.auto.offset.store": "false",
        "logger": librdkafka,
        **ours,
    }
    try:
        return Consumer({**DEFAULTS, **options, **fixed})
    except (KafkaException, TypeError, ValueError) as error:  # its text contains the value, which may be a password
        named = [name for name in options if name in str(error)] or sorted(options)
        named_options = ", ".join(named) or "KAFKA_BOOTSTRAP_SERVERS"
        raise SettingsError(f"KAFKA_OPTIONS: the Kafka client rejects them: correct {named_options}.") from None
