"""Destinations by name: `celery:QUEUE` is a queue of our broker; OUTBOX_DESTINATIONS names all others.

With INGEST_QUEUE=kafka wake-ups go to KAFKA_TOPIC, and dead letters stay in the broker. The name of the destination is
the same in both cases, so switching needs a restart and no change of rows.

An event names a destination and never an address, so that a row cannot send the relay to an arbitrary host.

    redis-stream://:password@host:6379/0?stream=NAME         entries of a Redis Stream (rediss-stream:// with TLS)
    amqp://user:password@host/vhost?exchange=NAME&routing_key=KEY    messages of RabbitMQ (amqps:// with TLS)
    kafka://host:9092,host2:9092/TOPIC                       records of Kafka; further options are librdkafka's
    https://host/path?secret=KEY                             a signed POST per event (allow_private=1, allow_http=1)

With `dedup=1` in the address the relay looks for an earlier event with the same payload before each publish.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from outbox.publishers.contract import Publisher
from settings import Settings

if TYPE_CHECKING:
    from outbox.publishers.signed_post import Patience, Poster

CELERY: Final = "celery:"


class UnknownDestination(Exception):
    """The destination is not configured, or its address cannot be used. The message never shows the address."""


@dataclass(frozen=True, slots=True)
class Destination:
    """An open destination, and how its events are treated."""

    publisher: Publisher
    dedup: bool = False  # look for an earlier event with the same payload first
    is_wakeup: bool = False  # events that died because it was unreachable start again when it answers


class OpenDestinations:
    """The destinations that a process has opened."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.by_name: dict[str, Destination] = {}

    def open(self, name: str) -> Destination:
        if name not in self.by_name:
            self.by_name[name] = open_destination(name, self.settings)
        return self.by_name[name]

    def close(self) -> None:
        for destination in self.by_name.values():
            destination.publisher.close()
        self.by_name.clear()


def is_wakeup(name: str) -> bool:
    """Return whether events of this destination go to a queue of our own broker."""
    return name.startswith(CELERY)


def open_destination(name: str, settings: Settings) -> Destination:
    """Return a destination that connects when it is first used."""
    if is_wakeup(name):
        return Destination(_queue(name.removeprefix(CELERY), settings), is_wakeup=True)
    url, options = _address(name, settings)
    dedup = options.pop("dedup", "") == "1"
    try:
        return Destination(_OPENERS[url.scheme](url, options), dedup=dedup)
    except ValueError as error:
        raise UnknownDestination(f"The address of {name!r} cannot be used: {error}.") from None


def open_poster(name: str, settings: Settings, *, patience: Patience | None = None, body_limit: int = 65_536) -> Poster:
    """Return a client for a destination with an http(s) address, for callers that need the answer itself."""
    url, _ = _address(name, settings)
    if url.scheme not in ("https", "http"):
        raise UnknownDestination(f"Destination {name!r} has no https:// address, which is needed to get an answer.")
    return poster_of(url, patience=patience, body_limit=body_limit)


def poster_of(url: SplitResult, *, patience: Patience | None = None, body_limit: int = 65_536) -> Poster:
    """Return a client for an http(s) address with our options in its query."""
    from outbox.publishers.signed_post import Patience, Poster  # noqa: PLC0415

    options = dict(parse_qsl(url.query, keep_blank_values=True))
    return Poster(**_post_options(url, options), patience=patience or Patience(), body_limit=body_limit)


def _address(name: str, settings: Settings) -> tuple[SplitResult, dict[str, str]]:
    """Return the address of a destination and the options in its query."""
    if name not in settings.outbox_destinations:
        raise UnknownDestination(
            f"There is no destination {name!r}: name it in OUTBOX_DESTINATIONS, or correct the event."
        )
    try:
        url = urlsplit(settings.outbox_destinations[name])
    except ValueError:  # its text would repeat the address
        raise UnknownDestination(f"The address of {name!r} cannot be used: it is not a URL.") from None
    if url.scheme not in _OPENERS:
        known = ", ".join(_OPENERS)
        raise UnknownDestination(f"The address of {name!r} cannot be used: its scheme must be one of {known}.")
    return url, dict(parse_qsl(url.query, keep_blank_values=True))


# Each publisher is imported when it is first needed, because its client library is slow to import.


def _queue(queue: str, settings: Settings) -> Publisher:
    is_dead_letter_queue = queue == settings.ingest_dlq_queue
    if settings.ingest_queue == "kafka" and not is_dead_letter_queue:
        from outbox.publishers.kafka_wakeups import KafkaWakeups  # noqa: PLC0415

        return KafkaWakeups.of(queue, settings)
    from outbox.publishers.celery import CeleryPublisher  # noqa: PLC0415

    return CeleryPublisher(settings.broker_queue(queue), settings.broker_url, declares=is_dead_letter_queue)


def _redis_stream(url: SplitResult, options: dict[str, str]) -> Publisher:
    from outbox.publishers.redis_stream import RedisStreamPublisher  # noqa: PLC0415

    if not options.get("stream"):
        raise ValueError("it names no stream, add ?stream=NAME")
    server = url._replace(scheme=url.scheme.removesuffix("-stream"), query="")
    return RedisStreamPublisher(urlunsplit(server), options["stream"])


def _amqp(url: SplitResult, options: dict[str, str]) -> Publisher:
    from outbox.publishers.amqp import AmqpPublisher  # noqa: PLC0415

    exchange, routing_key = options.get("exchange", ""), options.get("routing_key", "")
    if not exchange and not routing_key:
        raise ValueError("it names no exchange and no queue, add ?exchange=NAME&routing_key=KEY or ?routing_key=QUEUE")
    return AmqpPublisher(urlunsplit(url._replace(query="")), exchange=exchange, routing_key=routing_key)


def _kafka(url: SplitResult, options: dict[str, str]) -> Publisher:
    from outbox.publishers.kafka import KafkaPublisher  # noqa: PLC0415

    topic = unquote(url.path.removeprefix("/"))
    if "@" in url.netloc:
        raise ValueError("it contains a user, give sasl.username and sasl.password as options")
    if not topic or not url.netloc:
        raise ValueError("it must look like kafka://host:9092/TOPIC")
    return KafkaPublisher(url.netloc, topic, options=options)


def _http(url: SplitResult, options: dict[str, str]) -> Publisher:
    from outbox.publishers.webhook import HttpPublisher  # noqa: PLC0415

    return HttpPublisher(**_post_options(url, options))


def _post_options(url: SplitResult, options: dict[str, str]) -> dict[str, Any]:
    """Return the arguments of a Poster: the address without our options, and our options."""
    ours = {"secret", "dedup", "allow_private", "allow_http"}  # the rest of the query belongs to the receiver
    theirs = [part for part in url.query.split("&") if part.partition("=")[0] not in ours]
    flags = {name: options.get(name) == "1" for name in ("allow_private", "allow_http")}
    return {"url": urlunsplit(url._replace(query="&".join(theirs))), "secret": options.get("secret"), **flags}


_OPENERS: Final[dict[str, Callable[[SplitResult, dict[str, str]], Publisher]]] = {
    **dict.fromkeys(("redis-stream", "rediss-stream"), _redis_stream),
    **dict.fromkeys(("amqp", "amqps"), _amqp),
    "kafka": _kafka,
    **dict.fromkeys(("https", "http"), _http),
}
