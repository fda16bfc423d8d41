"""Publish wake-ups as records of KAFKA_TOPIC, for INGEST_QUEUE=kafka. A record is {"ids": […]} and nothing else.

Wake-ups that are published together become one record, as they become one message of Celery. If Kafka accepts none of
them, the cause is not a wake-up but the topic: it is missing, has too few replicas, or must not be written. They are
then treated as for an unreachable Kafka: only the probe counts attempts, and a dead one starts again when Kafka accepts
wake-ups.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from outbox.lease import ClaimedEvent
from outbox.publishers.celery import INGEST, messages
from outbox.publishers.contract import DestinationDown, Failed, Refused, Result
from outbox.publishers.kafka import KafkaPublisher
from settings import Settings

_WRONG: Final = 'The event is not a wake-up, which is {"type": text, "ids": [text, …]}.'


class KafkaWakeups:
    """Publish the wake-ups of one queue. All queues share the topic: the claim finds the queue of a task."""

    is_slow: ClassVar[bool] = False

    def __init__(self, queue: str, kafka: KafkaPublisher, *, queues: Collection[str]) -> None:
        self.queue = queue
        self.kafka = kafka
        self.queues = queues

    @classmethod
    def of(cls, queue: str, settings: Settings) -> KafkaWakeups:
        options = {name: value.get_secret_value() for name, value in settings.kafka_options.items()}
        kafka = KafkaPublisher(
            settings.kafka_bootstrap_servers, settings.kafka_topic, options=options, named_by="KAFKA_TOPIC"
        )
        return cls(queue, kafka, queues=settings.ingest_queues)

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        if self.queue not in self.queues:
            return [Refused(f"There is no queue {self.queue!r}: INGEST_QUEUES names the queues.")] * len(events)
        results: list[Result] = [Refused(_WRONG)] * len(events)
        wakeups = [message for message in messages(events) if message.task == INGEST]
        if not wakeups:
            return results
        firsts = [events[wakeup.places[0]] for wakeup in wakeups]
        records = [
            replace(first, payload={"ids": wakeup.args[0]}, headers={}, ordering_key=None)
            for first, wakeup in zip(firsts, wakeups, strict=True)
        ]
        told = self.kafka.publish(records)
        for wakeup, result in zip(wakeups, told, strict=True):
            wakeup.set_result(results, result)
        failures = [result for result in told if isinstance(result, Failed)]
        if len(failures) == len(told):
            raise DestinationDown(failures[0].error)
        return results

    def close(self) -> None:
        self.kafka.close()
