"""Messages to our own broker: wake-ups, which name tasks, and dead letters. They carry ids and nothing else (P4).

A wake-up's payload is {"type": …, "ids": […], "batch": n}, its header "priority" 0–9. Wake-ups of one type and priority that
are published together become one message of at most `batch` ids: bursts of single tasks are batches by themselves (P7).

A dead letter's payload is {"dead": id, "errorCode": …}. Its queue is declared here and nowhere else: a worker that is
not told otherwise consumes every queue that celeryconfig.py declares (P23).
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

import metrics
from outbox.lease import ClaimedEvent
from outbox.publishers.contract import DestinationDown, Failed, NotTried, Refused, Result, Sent

Errors = tuple[type[BaseException], ...]
INGEST: Final = "tasks.ingest"
DEAD_LETTER: Final = "tasks.dead_letter"
# A worker may wait long for its broker; a relay has other destinations to serve.
PATIENCE_SECONDS: Final = 3
LIMIT_SECONDS: Final = 15  # for a batch, if each confirm comes late
REDIS: Final = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), PATIENCE_SECONDS)
AMQP: Final = dict.fromkeys(("connect_timeout", "read_timeout", "write_timeout"), PATIENCE_SECONDS)
DEFAULT_BATCH: Final = 100
DEFAULT_PRIORITY: Final = 5


@dataclass(frozen=True, slots=True)
class Message:
    """What goes to the broker, and which events it carries (by their place in the batch)."""

    task: str
    args: list[Any]
    priority: int
    places: list[int]

    def tell(self, results: list[Result], result: Result) -> None:
        for place in self.places:
            results[place] = result


class CeleryPublisher:
    """One queue of the broker."""

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
        if self.declares:
            self._declare()
        if self.queue not in self.app.amqp.queues:
            return [Refused(f"There is no queue {self.queue!r}; celeryconfig.py declares the queues.")] * len(events)
        results: list[Result] = [Refused(_WRONG)] * len(events)
        wakeups = list(messages(events))
        for wakeup in wakeups:
            wakeup.tell(results, NotTried())
        try:
            self._connect()
            is_refused = self._send_all(wakeups, results)
        except (*self.lost_errors, *self.refusal_errors) as error:
            self._drop()
            raise DestinationDown(f"The broker takes no messages: {error.__cause__ or error}") from None
        if is_refused:
            self._drop()  # py-amqp would take the confirm of the refused message for that of the next
        letters = [
            wakeup for wakeup in wakeups if wakeup.task == DEAD_LETTER and isinstance(results[wakeup.places[0]], Sent)
        ]
        metrics.INGEST_TASK_DLQ_TOTAL.inc(len(letters))
        return results

    def close(self) -> None:
        self.connection.release()

    def _declare(self) -> None:
        """As celeryconfig.py declares the others, in the application of this publisher alone."""
        model = next(iter(self.app.amqp.queues.values()))
        if self.queue not in self.app.amqp.queues:
            self.app.amqp.queues.add(
                Queue(
                    self.queue,
                    model.exchange,
                    routing_key=self.queue,
                    durable=True,
                    queue_arguments=model.queue_arguments,
                )
            )

    def _connect(self) -> None:
        """kombu believes in a connection until it fails: one that RabbitMQ closed while it was idle is opened again."""
        if not self.is_redis and self.connection.connected:
            try:
                with suppress(TimeoutError):
                    self.connection.drain_events(timeout=0.001)
            except self.lost_errors:
                self._drop()
        self.connection.ensure_connection(max_retries=0)

    def _send_all(self, wakeups: Sequence[Message], results: list[Result]) -> bool:
        """True if one was refused: the rest is not tried then. Redis gets all at the end, RabbitMQ one by one."""
        deadline = time.monotonic() + LIMIT_SECONDS
        producer: Any = Producer(self.connection)  # batch() and its error are too new for the types
        with producer.batch():
            for wakeup in wakeups:
                if time.monotonic() > deadline:
                    break
                result = self._send(producer, wakeup)
                wakeup.tell(results, result)
                if isinstance(result, Failed):
                    return True
        return False

    def _send(self, producer: Producer, wakeup: Message) -> Result:
        priority = 9 - wakeup.priority if self.is_redis else wakeup.priority  # in Redis 0 is the most urgent
        try:
            self.app.send_task(
                wakeup.task,
                args=wakeup.args,
                argsrepr=f"({len(wakeup.places)})",  # cheaper than to write all ids once more
                queue=self.queue,
                priority=priority,
                producer=producer,
                retry=False,
                mandatory=True,  # RabbitMQ confirms also what it could not put into any queue
            )
        except self.lost_errors as error:
            if isinstance(error.__cause__, MessageNacked):  # kombu takes it for a lost connection
                return Failed("RabbitMQ did not keep it (basic.nack): its queue is full or unavailable.")
            raise
        except self.refusal_errors as error:
            return Failed(f"{type(error).__name__}: {error}")
        return Sent()

    def _drop(self) -> None:
        """AMQP says goodbye and waits for the answer, which would cost a frozen broker's patience once more."""
        if self.is_redis:
            self.connection.release()
        else:
            self.connection.collect()


_WRONG: Final = 'A wake-up is {"type": text, "ids": [text, …]}, a dead letter {"dead": text}; this event is neither.'


def messages(events: Sequence[ClaimedEvent]) -> Iterator[Message]:
    """Wake-ups of one type and priority together, in messages of at most `batch` ids. What is no wake-up is left out."""
    groups: dict[tuple[str, int, int], list[tuple[int, list[str]]]] = {}
    for place, event in enumerate(events):
        if isinstance(event.payload, dict) and isinstance(event.payload.get("dead"), str):
            yield Message(DEAD_LETTER, [event.payload["dead"], event.payload.get("errorCode")], 0, [place])
        elif wakeup := _wakeup(event):
            kind, ids = wakeup
            groups.setdefault(kind, []).append((place, ids))
    for (_type, priority, batch), wakeups in groups.items():
        together: list[str] = []
        places: list[int] = []
        for place, ids in wakeups:
            if together and len(together) + len(ids) > batch:
                yield Message(INGEST, [together], priority, places)
                together, places = [], []
            together += ids
            places.append(place)
        yield Message(INGEST, [together], priority, places)


def _wakeup(event: ClaimedEvent) -> tuple[tuple[str, int, int], list[str]] | None:
    match event.payload:
        case {"type": str(kind), "ids": [_, *_] as ids} if all(isinstance(one, str) for one in ids):
            priority = _within(event.headers.get("priority"), DEFAULT_PRIORITY, 0, 9)
            return (kind, priority, _within(event.payload.get("batch"), DEFAULT_BATCH, 1, 10_000)), list(ids)
    return None


def _within(value: Any, default: int, least: int, most: int) -> int:
    return min(max(value, least), most) if isinstance(value, int) else default
