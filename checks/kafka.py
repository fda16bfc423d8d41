"""Checks Kafka, if INGEST_QUEUE=kafka makes it carry the wake-ups."""

from __future__ import annotations

from collections.abc import Iterator

from checks.result import Finding, fail, ok
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
    yield ok("kafka", f"{settings.kafka_topic} has {len(found.ends)} partitions, {waiting}")
