"""Destinations by name: `celery:QUEUE` is a queue of our broker; all others are named in OUTBOX_DESTINATIONS.

An event names a destination and never an address, so that a row cannot point the relay at an arbitrary host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox.publishers.celery import CeleryPublisher
from outbox.publishers.contract import Publisher
from settings import Settings

CELERY: Final = "celery:"


class UnknownDestination(Exception):
    """No such destination is configured."""


@dataclass(frozen=True, slots=True)
class Destination:
    """How to publish to it, and what may happen to its events."""

    publisher: Publisher
    dedup: bool = False  # look for an earlier event with the same payload first (P21)
    is_ring: bool = False  # a hint: never DEAD because nobody answered (P19)


def open_destination(name: str, settings: Settings) -> Destination:
    if name.startswith(CELERY):
        return Destination(CeleryPublisher(name.removeprefix(CELERY), settings.broker_url), is_ring=True)
    raise UnknownDestination(f"There is no destination {name!r}: name it in OUTBOX_DESTINATIONS, or correct the event.")
