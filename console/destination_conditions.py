"""The condition of each destination of the outbox in a word and a sentence, from what the ledger knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from console import formats
from console.pipeline import LATE
from outbox.destination_states import DestinationState
from outbox.destinations import CELERY, is_wakeup
from outbox.outages import Outage
from tally.subjects import Subject
from tally.totals import Pace
from tasks.operations.pauses import QueuePause


@dataclass(frozen=True, slots=True)
class Condition:
    """How a destination is. `shade` is a class of the stylesheet."""

    word: str
    sentence: str
    shade: str = ""


GOOD: Final = "succeeded"
WARN: Final = "retrying"
BAD: Final = "dead"
UNKNOWN: Final = Condition("not configured", "OUTBOX_DESTINATIONS does not name it, so its events become dead.", BAD)
FAILING: Final = Condition("failing", "Everything that was tried in the last minute failed.", BAD)
PAUSED: Final = Condition("paused", "Its queue is paused. Wake-ups are sent again when it is resumed.", WARN)
WAITING: Final = Condition("waiting", "Events are due and none is sent. Does beat or `manage.py relay` run?", BAD)
BEHIND: Final = Condition("behind", "It answers, and events have waited for more than a minute.", WARN)
ANSWERS: Final = Condition("answers", "", GOOD)
QUIET: Final = Condition("quiet", "Nothing was sent in the last minute.")


@dataclass(frozen=True, slots=True)
class Destination:
    """A destination as the page shows it."""

    state: DestinationState
    about: str  # what kind of address it has; never the address
    queue: str | None  # of wake-ups
    sent: int  # in the last minute
    failed: int
    condition: Condition

    @property
    def name(self) -> str:
        return self.state.name


def describe(
    states: Collection[DestinationState],
    addresses: Mapping[str, str],
    *,
    pace: Sequence[Pace],
    pauses: Sequence[QueuePause],
    at: datetime,
) -> list[Destination]:
    """Return the destinations that have a problem first, then the others by name."""
    paused = {each.queue for each in pauses if not each.intake}
    published = [each for each in pace if each.subject is Subject.PUBLISH]
    counts = {(each.queue, each.result): round(each.per_second * 60) for each in published}
    found = []
    for state in states:
        queue = state.name.removeprefix(CELERY) if is_wakeup(state.name) else None
        sent = counts.get((state.name, "success"), 0)
        failed = counts.get((state.name, "failure"), 0) + counts.get((state.name, "dead"), 0)
        is_known = queue is not None or state.name in addresses
        condition = _condition(state, sent, failed, is_paused=queue in paused, is_known=is_known, at=at)
        about = "wake-ups of a queue" if queue is not None else _scheme(addresses.get(state.name))
        found.append(Destination(state, about, queue, sent, failed, condition))
    ranks = [BAD, WARN]
    return sorted(found, key=lambda each: ranks.index(each.condition.shade) if each.condition.shade in ranks else 2)


def _condition(
    state: DestinationState, sent: int, failed: int, *, is_paused: bool, is_known: bool, at: datetime
) -> Condition:
    backlog = state.backlog
    if state.outage is not None:
        return Condition("unreachable", _about(state.outage, has_due=backlog.due > 0, at=at), BAD)
    is_late = backlog.oldest_due is not None and backlog.oldest_due >= LATE
    has_events = bool(backlog.due or backlog.scheduled or backlog.dead)
    conditions = (
        (has_events and not is_known, UNKNOWN),
        (failed and not sent, FAILING),
        (is_paused, PAUSED),
        (is_late and not sent, WAITING),
        (is_late, BEHIND),
        (sent, ANSWERS),
    )
    return next((condition for applies, condition in conditions if applies), QUIET)


def _about(outage: Outage, *, has_due: bool, at: datetime) -> str:
    tries = "1 try" if outage.tries == 1 else f"{outage.tries:,} tries"
    next_try = outage.next_try(has_due=has_due)
    soon = "is due" if next_try <= at else f"comes {formats.distance(next_try, at)}"
    since, last = formats.duration(at - outage.since), formats.distance(outage.last_try, at)
    return f"No answer for {since}: {tries}, the last {last}. The next try {soon}."


def _scheme(address: str | None) -> str:
    return "not in OUTBOX_DESTINATIONS" if address is None else address.partition("://")[0].lower()
