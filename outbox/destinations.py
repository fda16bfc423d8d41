"""Destinations by name: `celery:QUEUE` is a queue of our broker; all others are named in OUTBOX_DESTINATIONS.

With INGEST_QUEUE=kafka wake-ups go to KAFKA_TOPIC instead, and dead letters stay where they were. An event keeps the name,
so that to switch is to restart.

An event names a destination and never an address, so that a row cannot point the relay at an arbitrary host.

    redis-stream://:password@host:6379/0?stream=NAME         entries of a Redis Stream (rediss-stream:// with TLS)
    amqp://user:password@host/vhost?exchange=NAME&routing_key=KEY    messages of RabbitMQ (amqps:// with TLS)
    kafka://host:9092,host2:9092/TOPIC                       records of Kafka; further options are librdkafka's
    https://host/path?secret=KEY                             a signed POST per event (allow_private=1, allow_http=1)

`dedup=1` in an address looks for an earlier event with the same payload before each publish (P21).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypedDict
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from outbox.publishers.contract import Publisher
from settings import Settings

if TYPE_CHECKING:
    from outbox.publishers.http_post import Patience, Poster

CELERY: Final = "celery:"


class UnknownDestination(Exception):
    """No such destination is configured, or its address cannot be used. The sentence never shows the address."""


@dataclass(frozen=True, slots=True)
class Destination:
    """How to publish to it, and what may happen to its events."""

    publisher: Publisher
    dedup: bool = False  # look for an earlier event with the same payload first (P21)
    is_wakeup: bool = False  # a hint: never DEAD because nobody answered (P19)


def is_wakeup(name: str) -> bool:
    """Its events are hints for a queue of our own broker."""
    return name.startswith(CELERY)


def open_destination(name: str, settings: Settings) -> Destination:
    if is_wakeup(name):
        queue = name.removeprefix(CELERY)
        declares = queue == settings.ingest_dlq_queue
        if settings.ingest_queue == "kafka" and not declares:
            return Destination(_kafka_wakeups(queue, settings), is_wakeup=True)
        from outbox.publishers.celery import CeleryPublisher  # noqa: PLC0415 - each kind is loaded when it is needed

        return Destination(CeleryPublisher(queue, settings.broker_url, declares=declares), is_wakeup=True)
    url, options = _address(name, settings)
    dedup = options.pop("dedup", "") == "1"
    try:
        return Destination(_OPENERS[url.scheme](url, options), dedup=dedup)
    except ValueError as error:
        raise UnknownDestination(f"The address of {name!r} cannot be used: {error}.") from None


def open_poster(name: str, settings: Settings, *, patience: Patience | None = None, body_limit: int = 65_536) -> Poster:
    """For whoever waits for the answer itself. Only a destination with an http(s) address has one."""
    from outbox.publishers.http_post import Poster  # noqa: PLC0415

    url, options = _address(name, settings)
    if url.scheme not in ("https", "http"):
        raise UnknownDestination(f"The destination {name!r} has no https:// address, so it cannot be asked.")
    return Poster(_receiver(url), **_terms(options), patience=patience, body_limit=body_limit)


def _address(name: str, settings: Settings) -> tuple[SplitResult, dict[str, str]]:
    """What OUTBOX_DESTINATIONS says, and the options in it."""
    if name not in settings.outbox_destinations:
        raise UnknownDestination(
            f"There is no destination {name!r}: name it in OUTBOX_DESTINATIONS, or correct the event."
        )
    try:
        url = urlsplit(settings.outbox_destinations[name])
    except ValueError:  # its text would repeat the address
        raise UnknownDestination(f"The address of {name!r} cannot be used: it is no address.") from None
    if url.scheme not in _OPENERS:
        raise UnknownDestination(
            f"The address of {name!r} cannot be used: it begins with {url.scheme!r}, which no publisher knows."
        )
    return url, dict(parse_qsl(url.query, keep_blank_values=True))


def _kafka_wakeups(queue: str, settings: Settings) -> Publisher:
    from outbox.publishers.kafka_wakeups import KafkaWakeups  # noqa: PLC0415

    return KafkaWakeups.of(queue, settings)


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
        raise ValueError("it holds a user, give sasl.username and sasl.password as options")
    if not topic or not url.netloc:
        raise ValueError("it is not kafka://host:9092/TOPIC")
    return KafkaPublisher(url.netloc, topic, options=options)


def _http(url: SplitResult, options: dict[str, str]) -> Publisher:
    from outbox.publishers.webhook import HttpPublisher  # noqa: PLC0415

    return HttpPublisher(_receiver(url), **_terms(options))


def _receiver(url: SplitResult) -> str:
    """The address without what is for us."""
    ours = {"secret", "dedup", "allow_private", "allow_http"}  # the rest of the query is the receiver's
    theirs = [part for part in url.query.split("&") if part.partition("=")[0] not in ours]
    return urlunsplit(url._replace(query="&".join(theirs)))


class _Terms(TypedDict):
    secret: str | None
    allow_private: bool
    allow_http: bool


def _terms(options: dict[str, str]) -> _Terms:
    return {
        "secret": options.get("secret"),
        "allow_private": options.get("allow_private") == "1",
        "allow_http": options.get("allow_http") == "1",
    }


_OPENERS: Final[dict[str, Callable[[SplitResult, dict[str, str]], Publisher]]] = {
    "redis-stream": _redis_stream,
    "rediss-stream": _redis_stream,
    "amqp": _amqp,
    "amqps": _amqp,
    "kafka": _kafka,
    "https": _http,
    "http": _http,
}
