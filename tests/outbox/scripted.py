"""A destination and a clock that a test controls, and the counts of the audit codes."""

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
    """A publisher whose results come from the test. It remembers the ids of the events it got."""

    is_slow: ClassVar[bool] = False
    answer: Callable[[ClaimedEvent], Result] = lambda _event: Sent()
    got: list[int] = field(default_factory=list)

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        self.got += [event.id for event in events]
        return [self.answer(event) for event in events]

    def close(self) -> None:
        pass


class Clock:
    """A clock for circuits, moved by the test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def scripted(relay: Relay, name: str, answer: Callable[[ClaimedEvent], Result], **how: bool) -> Scripted:
    publisher = Scripted(answer)
    relay._destinations.by_name[name] = Destination(publisher, **how)
    return publisher


def audit_counts() -> Counter[str]:
    """Return the metric `outbox_flush_total`, by code."""
    (family,) = metrics.OUTBOX_FLUSH_TOTAL.collect()
    samples = [sample for sample in family.samples if sample.name.endswith("_total")]
    return Counter({sample.labels["code"]: int(sample.value) for sample in samples})
