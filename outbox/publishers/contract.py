"""What a publisher promises. `tests/outbox/publishers/` holds every publisher to it.

`publish` gets events of one destination, in the order in which they should arrive, and returns one result for each, in
the same order. `Sent` only after the destination has confirmed. It returns within its own time limits, and raises
nothing but `DestinationDown`: nobody answered, what has arrived is not known, and all of it may be sent again.
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
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """It will never arrive as it is; an operator must look."""

    error: str


Result = Sent | Failed | Refused


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
