"""What a publisher promises. tests/outbox/publishers/test_contract.py holds every publisher to it.

`publish` gets events of one destination and returns one result for each, in the same order. `Sent` means that the
destination has confirmed the event. `publish` returns within its own time limits, well below a lease; an event that it
had no time for is `NotTried`. It raises nothing but `DestinationDown`: the destination gave no answer, and any of the
events may have arrived, so all are sent again. Events may arrive in any order: those that must keep an order have an
`ordering_key`, and a batch contains at most one event per key.

A constructor opens nothing. It may raise ValueError, with a message that does not show the address.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from models.errors import CeleriacError
from outbox.lease import ClaimedEvent

PATIENCE_SECONDS: Final = 3  # how long a publisher waits for a silent server
BATCH_SECONDS: Final = 15  # for a batch whose confirms arrive slowly
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
NACKED: Final = "RabbitMQ did not accept it (basic.nack): its queue is full or unavailable."


@dataclass(frozen=True, slots=True)
class Sent:
    """The event has arrived. `external_id` is the id that the destination gave it, if any."""

    external_id: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The event has not arrived, or it is unknown whether it has; another attempt may help."""

    error: str
    retry_after_seconds: float | None = None  # as the destination asked for; at most a day


@dataclass(frozen=True, slots=True)
class Refused:
    """The event will never arrive as it is; an operator must act."""

    error: str


@dataclass(frozen=True, slots=True)
class NotTried:
    """There was no time for the event, or no answer about it: it is released, and no attempt is counted."""


Result = Sent | Failed | Refused | NotTried


class DestinationDown(CeleriacError):
    """The destination is unreachable.

    The server of a destination is stopped, does not answer in time, or rejects the login.
    """

    code = "destination_down"
    remedy = "Start the server, or correct its address in OUTBOX_DESTINATIONS. The relay tries again by itself."
    http_status = 503
    exit_code = 3


class Publisher(Protocol):
    """A client of one destination. It is used by one thread at a time."""

    is_slow: ClassVar[bool]  # a call may take seconds, so leases are renewed before it

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]: ...

    def close(self) -> None: ...


def json_bytes(value: Any) -> bytes:
    """Return compact JSON. An unpaired surrogate has no UTF-8; it becomes the escape that JSON has for it."""
    return _encode(value).encode("utf-8", "backslashreplace")
