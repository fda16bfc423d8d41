"""Checks Kafka, if INGEST_QUEUE=kafka makes it carry the wake-ups."""

from __future__ import annotations

from collections.abc import Iterator

from checks.result import Finding, fail, ok
from models.engine import engine
from settings import Settings


def check(settings: Settings) -> Iterator[Finding]:
    if settings.ingest_queue != "kafka":
        return
    from tasks.kafka.lag import progress  # noqa: PLC0415 - a foreign `tasks` package must not stop the other checks

    found = progress(settings)
    if not found.ends:
        yield fail("kafka", f"has no topic {settings.kafka_topic!r}", "create it, or correct KAFKA_TOPIC")
        return
    waiting = f"{found.waiting:,} messages wait for the group {settings.kafka_group!r}"
    if not _is_consumed(settings):
        remedy = "start `manage.py kafka-worker`, or correct KAFKA_TOPIC of your workers"
        yield fail("kafka", f"no live worker consumes {settings.kafka_topic}; {waiting}", remedy)
    else:
        yield ok("kafka", f"{settings.kafka_topic} has {len(found.ends)} partitions, {waiting}")


def _is_consumed(settings: Settings) -> bool:
    """Return whether a live worker reads the topic.

    The ledger knows it: each worker renews its row there. Kafka's own list of group members would need the right to
    describe groups, which the workers do not have.
    """
    from tasks.core.registered_types import live_workers  # noqa: PLC0415 - as above

    with engine().connect() as connection:
        return any(each.topic == settings.kafka_topic for each in live_workers(connection))
