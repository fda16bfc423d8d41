"""Destinations by name: `celery:QUEUE` is a queue of our broker; all others are named in OUTBOX_DESTINATIONS.

An event names a destination and never an address, so that a row cannot point the relay at an arbitrary host.

    redis-stream://:password@host:6379/0?stream=NAME       entries of a Redis Stream (rediss-stream:// with TLS)

`dedup=1` in an address looks for an earlier event with the same payload before each publish (P21).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from outbox.publishers.celery import CeleryPublisher
from outbox.publishers.contract import Publisher
from outbox.publishers.redis_stream import RedisStreamPublisher
from settings import Settings

CELERY: Final = "celery:"


class UnknownDestination(Exception):
    """No such destination is configured, or its address cannot be used. The sentence never shows the address."""


@dataclass(frozen=True, slots=True)
class Destination:
    """How to publish to it, and what may happen to its events."""

    publisher: Publisher
    dedup: bool = False  # look for an earlier event with the same payload first (P21)
    is_ring: bool = False  # a hint: never DEAD because nobody answered (P19)


def is_ring(name: str) -> bool:
    """Its events are hints for a queue of our own broker."""
    return name.startswith(CELERY)


def open_destination(name: str, settings: Settings) -> Destination:
    if is_ring(name):
        return Destination(CeleryPublisher(name.removeprefix(CELERY), settings.broker_url), is_ring=True)
    if name not in settings.outbox_destinations:
        raise UnknownDestination(
            f"There is no destination {name!r}: name it in OUTBOX_DESTINATIONS, or correct the event."
        )
    url = urlsplit(settings.outbox_destinations[name])
    options = dict(parse_qsl(url.query))
    match url.scheme:
        case "redis-stream" | "rediss-stream" if options.get("stream"):
            server = urlunsplit(url._replace(scheme=url.scheme.removesuffix("-stream"), query=""))
            publisher = RedisStreamPublisher(server, options["stream"])
        case "redis-stream" | "rediss-stream":
            raise UnknownDestination(f"The address of {name!r} names no stream: add ?stream=NAME.")
        case scheme:
            raise UnknownDestination(f"The address of {name!r} begins with {scheme!r}, which no publisher knows.")
    return Destination(publisher, dedup=options.get("dedup") == "1")
