"""Measure how far the group has read the topic, and find lost wake-ups (docs/protocol.md, Lost wake-ups).

Redis and RabbitMQ deliver messages in one order, so a wake-up that a later one has overtaken is lost. Kafka's
partitions progress at different speeds, so that rule would send wake-ups of a slow partition again and again. Instead,
we remember the ends of all partitions together with the ledger's time. When the group has read
that far, every wake-up published before that time has been read or is lost. In an empty topic that is true at once.
Each process has its own memory: a process that looks only once can find lost wake-ups in an empty topic only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from models.errors import Unreachable
from settings import Settings
from tasks.kafka.client import make_consumer
from tasks.recovery.lost_wakeups import OverdueTask

PATIENCE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Progress:
    """By partition: where the topic ends, and the offset up to which the group has committed."""

    ends: dict[int, int]
    done: dict[int, int]

    @property
    def waiting(self) -> int:
        return sum(max(end - self.done.get(partition, 0), 0) for partition, end in self.ends.items())

    def has_passed(self, ends: dict[int, int]) -> bool:
        return all(self.done.get(partition, 0) >= end for partition, end in ends.items())

    def was_recreated_since(self, ends: dict[int, int]) -> bool:
        """Return whether the topic was deleted and created again, so that its offsets start at 0."""
        return any(self.ends.get(partition, 0) < end for partition, end in ends.items())


def progress(settings: Settings) -> Progress:
    """Read the progress of the group. Raise Unreachable."""
    try:
        with closing(make_consumer(settings)) as consumer:
            return _progress(consumer, settings.kafka_topic)
    except KafkaException as error:
        raise Unreachable(f"Kafka is unreachable: {error.args[0].str()}") from None


def _progress(consumer: Consumer, topic: str) -> Progress:
    """Read the ends before the committed offsets: a record that arrives between must not count as read.

    A topic that does not exist is empty.
    """
    known = consumer.list_topics(topic, timeout=PATIENCE_SECONDS).topics[topic].partitions
    partitions = [TopicPartition(topic, number) for number in known]
    if not partitions:
        return Progress({}, {})
    ends: dict[int, int] = {}
    starts: dict[int, int] = {}
    for one in partitions:
        starts[one.partition], ends[one.partition] = consumer.get_watermark_offsets(one, timeout=PATIENCE_SECONDS)
    committed = consumer.committed(partitions, timeout=PATIENCE_SECONDS)
    return Progress(ends, {one.partition: max(one.offset, starts[one.partition]) for one in committed})


@dataclass(slots=True)
class Memory:
    """By queue: where the topic ended when all old wake-ups of the queue had been published."""

    seen: dict[str, tuple[datetime, dict[int, int]]] = field(default_factory=dict)

    def lost(self, overdue: Sequence[OverdueTask], settings: Settings) -> list[OverdueTask]:
        """Return the tasks whose wake-up is lost. Their queues must have no old wake-up left to publish."""
        found = progress(settings)
        grace = timedelta(milliseconds=settings.ingest_wakeup_grace_ms)
        passed: dict[str, datetime] = {}
        for queue, now in {task.queue: task.observed_at for task in overdue}.items():
            then, ends = self.seen.get(queue, (now, found.ends))
            if not found.waiting:
                passed[queue] = now
            elif found.has_passed(ends):
                passed[queue] = then
            if queue in passed or queue not in self.seen or found.was_recreated_since(ends):
                self.seen[queue] = (now, found.ends)
        return [one for one in overdue if one.queue in passed and one.last_wakeup_at + grace <= passed[one.queue]]


_memory: Final = Memory()


def lost(overdue: Sequence[OverdueTask], settings: Settings) -> list[OverdueTask]:
    """Return the tasks whose wake-up is lost, using the memory of this process."""
    return _memory.lost(overdue, settings)
