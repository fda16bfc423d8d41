"""What a publisher promises. `tests/outbox/publishers/` holds every publisher to it.

`publish` gets events of one destination and returns one result for each, in the same order. `Sent` only after the
destination has confirmed. It returns within its own time limits, well below a lease (what it did not get to is
`NotTried`), and raises nothing but `DestinationDown`: nobody answered, what has arrived is not known, and all of it may
be sent again. Events need not arrive in the order of the batch: those that must wait for each other have an
`ordering_key`, and a batch holds one of them at most (P20). A constructor opens nothing; ValueError is the only thing
that it raises, in a sentence that does not show the address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from models.errors import CeleriacError
from outbox.lease import ClaimedEvent


@dataclass(frozen=True, slots=True)
class Sent:
    """It has arrived. `external_id` is the destination's own name for it, if it gave one."""

    external_id: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """It has not arrived, or nobody knows; it is worth another attempt."""

    error: str
    retry_after_seconds: float | None = None  # as the destination asked for; at most a day


@dataclass(frozen=True, slots=True)
class Refused:
    """It will never arrive as it is; an operator must look."""

    error: str


@dataclass(frozen=True, slots=True)
class NotTried:
    """Its turn did not come, or nobody said what became of it: it is given back as it was."""


Result = Sent | Failed | Refused | NotTried


class DestinationDown(CeleriacError):
    """The destination does not answer."""

    code = "destination_down"
    http_status = 503
    exit_code = 3


class Publisher(Protocol):
    """One open way to one destination. Used by one thread at a time."""

    is_slow: ClassVar[bool]  # its calls may take seconds, so leases are renewed around them

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]: ...

    def close(self) -> None: ...
