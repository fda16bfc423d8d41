"""Rings: `tasks.ingest` messages with task ids and nothing else (P4).

A ring's payload is {"type": …, "ids": […], "batch": n}, its header "priority" 0–9. Rings of one type and priority that
are published together become one message of at most `batch` ids: bursts of single tasks are batches by themselves (P7).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from celery import Celery
from kombu import Producer
from kombu.exceptions import KombuError, OperationalError

from outbox.lease import ClaimedEvent
from outbox.publishers.contract import DestinationDown, Failed, Refused, Result, Sent

Errors = tuple[type[BaseException], ...]
TASK: Final = "tasks.ingest"
# A worker may wait long for its broker; a relay has other destinations to serve.
PATIENCE_SECONDS: Final = 3
TIMEOUTS: Final = {"socket_timeout", "socket_connect_timeout", "connect_timeout", "read_timeout", "write_timeout"}
DEFAULT_BATCH: Final = 100
DEFAULT_PRIORITY: Final = 5


@dataclass(frozen=True, slots=True)
class Message:
    """What goes to the broker, and which events it carries (by their place in the batch)."""

    ids: list[str]
    priority: int
    places: list[int]


class CeleryPublisher:
    """One queue of the broker."""

    is_slow: ClassVar[bool] = False

    def __init__(self, queue: str, broker_url: str) -> None:
        self.queue = queue
        self.app = Celery("celeriac-outbox", broker=broker_url, set_as_current=False)
        self.app.config_from_object("celeryconfig")
        options = dict(self.app.conf.broker_transport_options)
        for timeout in TIMEOUTS & options.keys():
            options[timeout] = PATIENCE_SECONDS
        self.connection = self.app.connection_for_write(transport_options=options)
        self.lost_errors: Errors = (OperationalError, *self.connection.connection_errors)
        self.refusal_errors: Errors = (KombuError, *self.connection.channel_errors)
        self.lowest_first = self.connection.transport.driver_type == "redis"  # there 0 is the most urgent

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        results: list[Result] = [Refused(_WRONG)] * len(events)
        if self.queue not in self.app.amqp.queues:
            return [Refused(f"There is no queue {self.queue!r}; celeryconfig.py declares the queues.")] * len(events)
        try:
            self.connection.ensure_connection(max_retries=1, interval_start=0, timeout=5)
            with Producer(self.connection) as producer:
                for message in messages(events):
                    result = self._send(producer, message)
                    for place in message.places:
                        results[place] = result
        except self.lost_errors as error:
            self.close()
            raise DestinationDown(f"The broker does not answer: {error}") from None
        return results

    def close(self) -> None:
        self.connection.release()

    def _send(self, producer: Producer, message: Message) -> Result:
        priority = 9 - message.priority if self.lowest_first else message.priority
        try:
            self.app.send_task(
                TASK, args=(message.ids,), queue=self.queue, priority=priority, producer=producer, retry=False
            )
        except self.lost_errors:
            raise
        except self.refusal_errors as error:
            return Failed(f"{type(error).__name__}: {error}")
        return Sent()


_WRONG: Final = 'A ring is {"type": text, "ids": [text, …]}, and this event is none.'


def messages(events: Sequence[ClaimedEvent]) -> Iterator[Message]:
    """Rings of one type and priority together, in messages of at most `batch` ids. What is no ring is left out."""
    groups: dict[tuple[str, int, int], list[tuple[int, list[str]]]] = {}
    for place, event in enumerate(events):
        if ring := _ring(event):
            kind, ids = ring
            groups.setdefault(kind, []).append((place, ids))
    for (_type, priority, batch), rings in groups.items():
        message = Message([], priority, [])
        for place, ids in rings:
            if message.ids and len(message.ids) + len(ids) > batch:
                yield message
                message = Message([], priority, [])
            message.ids.extend(ids)
            message.places.append(place)
        yield message


def _ring(event: ClaimedEvent) -> tuple[tuple[str, int, int], list[str]] | None:
    match event.payload:
        case {"type": str(kind), "ids": [_, *_] as ids} if all(isinstance(one, str) for one in ids):
            priority = _within(event.headers.get("priority"), DEFAULT_PRIORITY, 0, 9)
            return (kind, priority, _within(event.payload.get("batch"), DEFAULT_BATCH, 1, 10_000)), list(ids)
    return None


def _within(value: Any, default: int, least: int, most: int) -> int:
    return min(max(value, least), most) if isinstance(value, int) else default
