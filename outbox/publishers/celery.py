"""Publish messages to our own broker: wake-ups, which name tasks, and dead letters. They carry ids and nothing else.

The payload of a wake-up is {"type": …, "ids": […], "batch": n}; its header "priority" is 0–9. Wake-ups of one type and
priority that are published together become one message of at most `batch` ids, so that a burst of single tasks becomes
a few batches. With a batch of 1 each has a message of its own: that is how isolated tasks are woken.

The payload of a dead letter is {"dead": id, "errorCode": …}, and "again": true if it was in the queue before. Its
queue is declared here and nowhere else: by default a worker consumes every queue that celeryconfig.py declares. See
docs/protocol.md, The dead-letter queue.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from amqp.exceptions import MessageNacked
from celery import Celery
from kombu import Producer, Queue
from kombu.exceptions import BatchPublishError, KombuError, OperationalError  # type: ignore[attr-defined]

from outbox.lease import ClaimedEvent
from outbox.publishers import contract
from outbox.publishers.contract import DestinationDown, Failed, NotTried, Refused, Result, Sent
from tally.counts import count
from tally.subjects import Subject

Errors = tuple[type[BaseException], ...]
INGEST: Final = "tasks.ingest"
DEAD_LETTER: Final = "tasks.dead_letter"
# Shorter than those of a worker: a relay has other destinations to serve.
REDIS: Final = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), contract.PATIENCE_SECONDS)
AMQP: Final = dict.fromkeys(("connect_timeout", "read_timeout", "write_timeout"), contract.PATIENCE_SECONDS)
DEFAULT_BATCH: Final = 1000
DEFAULT_PRIORITY: Final = 5
_WRONG: Final = 'The event is neither a wake-up, {"type": text, "ids": [text, …]}, nor a dead letter, {"dead": text}.'


@dataclass(frozen=True, slots=True)
class Message:
    """A message for the broker, and the places of its events in the batch."""

    task: str
    args: list[Any]
    priority: int
    places: list[int]

    def set_result(self, results: list[Result], result: Result) -> None:
        for place in self.places:
            results[place] = result


class CeleryPublisher:
    """Publish to one queue of the broker."""

    is_slow: ClassVar[bool] = False

    def __init__(self, queue: str, broker_url: str, *, declares: bool = False) -> None:
        self.queue = queue
        self.declares = declares
        self.is_redis = broker_url.partition(":")[0] in ("redis", "rediss")
        self.app = Celery("celeriac-outbox", broker=broker_url, set_as_current=False)
        self.app.config_from_object("celeryconfig")
        options = REDIS if self.is_redis else {**AMQP, "confirm_publish": True}  # Sent means confirmed
        self.connection = self.app.connection_for_write(transport_options=options)
        self.lost_errors: Errors = (OperationalError, BatchPublishError, *self.connection.connection_errors)
        self.refusal_errors: Errors = (KombuError, *self.connection.channel_errors)

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        queues = self.app.amqp.queues
        if self.declares and self.queue not in queues:  # like the queues of celeryconfig.py, in this application only
            model = next(iter(queues.values()))
            arguments = model.queue_arguments
            queues.add(
                Queue(self.queue, model.exchange, routing_key=self.queue, durable=True, queue_arguments=arguments)
            )
        if self.queue not in queues:
            return [Refused(f"There is no queue {self.queue!r}: celeryconfig.py declares the queues.")] * len(events)
        results: list[Result] = [Refused(_WRONG)] * len(events)
        batch = list(messages(events))
        for message in batch:
            message.set_result(results, NotTried())
        try:
            self._connect()
            is_refused = self._send_all(batch, results)
        except (*self.lost_errors, *self.refusal_errors) as error:
            self._drop()
            raise DestinationDown(f"The broker accepts no messages: {error.__cause__ or error}") from None
        if is_refused:
            self._drop()  # py-amqp would take the confirm of the refused message for that of the next one
        letters = [one.places[0] for one in batch if one.task == DEAD_LETTER]
        new = [place for place in letters if not events[place].payload.get("again")]
        count(Subject.DEAD_LETTER, "sent", sum(isinstance(results[place], Sent) for place in new), queue=self.queue)
        return results

    def close(self) -> None:
        self.connection.release()

    def _connect(self) -> None:
        """Connect. kombu does not notice by itself that RabbitMQ has closed an idle connection."""
        if not self.is_redis and self.connection.connected:
            try:
                with suppress(TimeoutError):
                    self.connection.drain_events(timeout=0.001)
            except self.lost_errors:
                self._drop()
        self.connection.ensure_connection(max_retries=0)

    def _send_all(self, batch: Sequence[Message], results: list[Result]) -> bool:
        """Send messages: to Redis all at the end, to RabbitMQ one by one. Stop and return True if one is refused."""
        deadline = time.monotonic() + contract.BATCH_SECONDS
        producer: Any = Producer(self.connection)  # kombu's types do not know batch() yet
        with producer.batch():
            for message in batch:
                if time.monotonic() > deadline:
                    break
                result = self._send(producer, message)
                message.set_result(results, result)
                if isinstance(result, Failed):
                    return True
        return False

    def _send(self, producer: Producer, message: Message) -> Result:
        priority = 9 - message.priority if self.is_redis else message.priority  # in Redis 0 is the most urgent
        try:
            self.app.send_task(
                message.task,
                args=message.args,
                argsrepr=f"({len(message.places)})",  # cheaper than writing all ids once more
                queue=self.queue,
                priority=priority,
                producer=producer,
                retry=False,
                mandatory=True,  # otherwise RabbitMQ confirms a message that it could not put into a queue
            )
        except self.lost_errors as error:
            if isinstance(error.__cause__, MessageNacked):  # kombu treats it as a lost connection
                return Failed(contract.NACKED)
            raise
        except self.refusal_errors as error:
            return Failed(f"{type(error).__name__}: {error}")
        return Sent()

    def _drop(self) -> None:
        """Drop the connection. For AMQP without the closing handshake, which a frozen broker does not answer."""
        if self.is_redis:
            self.connection.release()
        else:
            self.connection.collect()


def messages(events: Sequence[ClaimedEvent]) -> Iterator[Message]:
    """Combine wake-ups of one type and priority into messages of at most `batch` ids. Skip events of other kinds."""
    groups: dict[tuple[str, int, int], list[tuple[int, list[str]]]] = {}
    for place, event in enumerate(events):
        match event.payload:
            case {"dead": str(id_)}:
                yield Message(DEAD_LETTER, [id_, event.payload.get("errorCode")], 0, [place])
            case {"type": str(kind), "ids": [_, *_] as ids} if all(isinstance(one, str) for one in ids):
                priority = _within(event.headers.get("priority"), DEFAULT_PRIORITY, 0, 9)
                batch = _within(event.payload.get("batch"), DEFAULT_BATCH, 1, 10_000)
                groups.setdefault((kind, priority, batch), []).append((place, ids))
    for (_, priority, batch), wakeups in groups.items():
        together: list[str] = []
        places: list[int] = []
        for place, ids in wakeups:
            if together and len(together) + len(ids) > batch:
                yield Message(INGEST, [together], priority, places)
                together, places = [], []
            together += ids
            places.append(place)
        yield Message(INGEST, [together], priority, places)


def _within(value: Any, default: int, least: int, most: int) -> int:
    return min(max(value, least), most) if isinstance(value, int) else default
