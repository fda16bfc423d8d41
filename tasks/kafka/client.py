"""A consumer of KAFKA_TOPIC in the group of the workers: how it is made, and what the contract stands on."""

from __future__ import annotations

from typing import Any, Final

from confluent_kafka import Consumer, KafkaException

from outbox.publishers.kafka import librdkafka
from settings import Settings, SettingsError

DEFAULTS: Final = {
    "client.id": "celeriac",
    "auto.offset.reset": "earliest",  # a group that is new, or was away too long, misses nothing
    "partition.assignment.strategy": "cooperative-sticky",  # who comes or goes moves few of them
    "session.timeout.ms": "10000",  # the partitions of a worker that was killed go to others after this
    "heartbeat.interval.ms": "2000",
    "topic.metadata.refresh.interval.ms": "10000",  # a topic that is made after the worker has started is found
    "fetch.wait.max.ms": "100",  # an idle partition does not hold up its neighbours on the same broker
    "log.connection.close": "false",  # brokers close what is idle
}


def make_consumer(settings: Settings, **ours: Any) -> Consumer:
    """`ours` wins over KAFKA_OPTIONS, which win over the defaults."""
    options = {name: value.get_secret_value() for name, value in settings.kafka_options.items()}
    fixed = {
        "bootstrap.servers": settings.kafka_bootstrap_servers,
        "group.id": settings.kafka_group,
        "enable.auto.commit": "false",  # offsets follow the guard and nothing else
        "enable.auto.offset.store": "false",
        "logger": librdkafka,
        **ours,
    }
    try:
        return Consumer({**DEFAULTS, **options, **fixed})
    except (KafkaException, TypeError, ValueError) as error:  # its words repeat the value, which may be a password
        named = [name for name in options if name in str(error)] or sorted(options)
        look_at = ", ".join(named) or "KAFKA_BOOTSTRAP_SERVERS"
        raise SettingsError(f"KAFKA_OPTIONS: Kafka's client does not take them, look at {look_at}.") from None
