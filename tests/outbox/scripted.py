"""A destination and a clock that a test controls, and the counts of the audit codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from models.engine import engine
from outbox.destinations import Destination
from outbox.lease import ClaimedEvent
from outbox.publishers.contract import Result, Sent
from outbox.relay import Relay
from tally.counts import counts
from tally.subjects import Subject
from tally.totals import read_totals


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
    """Return how many audits the tally has, by code."""
    counts.append()
    with engine().connect() as connection:
        return Counter({each.result: each.count for each in read_totals(connection) if each.subject is Subject.FLUSH})
