"""A destination that does what a test says, and what the relay counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import metrics
from outbox.destinations import Destination
from outbox.lease import ClaimedEvent
from outbox.publishers.contract import Result, Sent
from outbox.relay import Relay


@dataclass
class Scripted:
    """A destination that does what the test says, and remembers what it was given."""

    is_slow: ClassVar[bool] = False
    answer: Callable[[ClaimedEvent], Result] = lambda _event: Sent()
    got: list[int] = field(default_factory=list)

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        self.got += [event.id for event in events]
        return [self.answer(event) for event in events]

    def close(self) -> None:
        pass


def scripted(relay: Relay, name: str, answer: Callable[[ClaimedEvent], Result], **how: bool) -> Scripted:
    publisher = Scripted(answer)
    relay._destinations[name] = Destination(publisher, **how)
    return publisher


def flushed() -> Counter[str]:
    """What `outbox_flush_total` says, by code."""
    (family,) = metrics.OUTBOX_FLUSH_TOTAL.collect()
    samples = [sample for sample in family.samples if sample.name.endswith("_total")]
    return Counter({sample.labels["code"]: int(sample.value) for sample in samples})
