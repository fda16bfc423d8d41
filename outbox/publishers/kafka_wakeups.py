"""Wake-ups as records of KAFKA_TOPIC, for INGEST_QUEUE=kafka. A record is {"ids": […]} and nothing else (P4).

Wake-ups that are published together become one record as they become one message of Celery. A wake-up that Kafka does not
take is not its own fault: a topic that is missing, too few replicas, no right to write. All of them wait then, as for a
Kafka that is away, and none dies of it (P19).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from outbox.lease import ClaimedEvent
from outbox.publishers.celery import INGEST, Message, messages
from outbox.publishers.contract import DestinationDown, Failed, Refused, Result
from outbox.publishers.kafka import KafkaPublisher
from settings import Settings


class KafkaWakeups:
    """The wake-ups of one queue. All queues share the topic: the guard knows whose a task is."""

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
            return [Refused(f"There is no queue {self.queue!r}; INGEST_QUEUES names the queues.")] * len(events)
        results: list[Result] = [Refused(_WRONG)] * len(events)
        wakeups = [message for message in messages(events) if message.task == INGEST]
        if not wakeups:
            return results
        told = self.kafka.publish([_record(events, wakeup) for wakeup in wakeups])
        for wakeup, result in zip(wakeups, told, strict=True):
            wakeup.tell(results, result)
        failures = [result for result in told if isinstance(result, Failed)]
        if len(failures) == len(told):
            raise DestinationDown(failures[0].error)
        return results

    def close(self) -> None:
        self.kafka.close()


_WRONG: Final = 'A wake-up is {"type": text, "ids": [text, …]}; this event is none.'


def _record(events: Sequence[ClaimedEvent], wakeup: Message) -> ClaimedEvent:
    """In the name of the first of its events."""
    return replace(events[wakeup.places[0]], payload={"ids": wakeup.args[0]}, headers={}, ordering_key=None)
