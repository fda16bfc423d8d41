"""What waits in the topic, and which wake-ups cannot be there any more (P8).

A wake-up is lost when the group has passed every record that was there after it had been published, and its task still
waits. Redis and RabbitMQ hand out messages in one order, so that whoever was overtaken is lost; partitions are not in
step with each other, and a slow one would be woken for again and again. So the ends of all partitions are remembered
with the ledger's time; when the group has come that far, what had been woken by then is lost. With nothing waiting that
is so at once. A process remembers for itself: one that looks once knows only the case of nothing waiting.
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
from tasks.recovery.lost_wakeups import Suspect

PATIENCE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Progress:
    """By partition: where the topic ends, and up to where the group has done all."""

    ends: dict[int, int]
    done: dict[int, int]

    @property
    def waiting(self) -> int:
        return sum(max(end - self.done.get(partition, 0), 0) for partition, end in self.ends.items())

    def has_passed(self, ends: dict[int, int]) -> bool:
        return all(self.done.get(partition, 0) >= end for partition, end in ends.items())

    def is_of_another_topic(self, ends: dict[int, int]) -> bool:
        """One that was made anew under the same name begins from nothing."""
        return any(self.ends.get(partition, 0) < end for partition, end in ends.items())


def progress(settings: Settings) -> Progress:
    """Raises Unreachable. The ends are read first: what comes meanwhile is not counted as done."""
    try:
        with closing(make_consumer(settings)) as consumer:
            return _progress(consumer, settings.kafka_topic)
    except KafkaException as error:
        raise Unreachable(f"Kafka does not answer: {error.args[0].str()}") from None


def _progress(consumer: Consumer, topic: str) -> Progress:
    """A topic that is not there holds nothing."""
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
    """Where the topic ended when a queue had no unsent wake-up of old, by queue."""

    seen: dict[str, tuple[datetime, dict[int, int]]] = field(default_factory=dict)

    def lost(self, suspects: Sequence[Suspect], settings: Settings) -> list[Suspect]:
        """Of these, whose queues have no unsent wake-up of old at this moment: their own have left."""
        found = progress(settings)
        grace = timedelta(milliseconds=settings.ingest_wakeup_grace_ms)
        passed: dict[str, datetime] = {}
        for queue, now in {suspect.queue: suspect.looked_at for suspect in suspects}.items():
            then, ends = self.seen.get(queue, (now, found.ends))
            if not found.waiting:
                passed[queue] = now
            elif found.has_passed(ends):
                passed[queue] = then
            if queue in passed or queue not in self.seen or found.is_of_another_topic(ends):
                self.seen[queue] = (now, found.ends)
        return [one for one in suspects if one.queue in passed and one.last_wakeup_at + grace <= passed[one.queue]]


_memory: Final = Memory()


def lost(suspects: Sequence[Suspect], settings: Settings) -> list[Suspect]:
    """By what this process remembers."""
    return _memory.lost(suspects, settings)
