"""How the pages of bulk actions name what an action does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from models.bulk_actions import BulkState, BulkVerb


@dataclass(frozen=True, slots=True)
class Words:
    """What the pages say about an action."""

    title: str
    done: str
    changes: str  # of the tasks that match, which ones it changes
    effect: str


WORDS: Final = {
    BulkVerb.REQUEUE: Words(
        "Requeue",
        "requeued",
        "dead tasks",
        "Their attempts start again at zero, and they run as soon as a worker is free.",
    ),
    BulkVerb.DISCARD: Words(
        "Discard",
        "discarded",
        "tasks that are dead, queued or retrying",
        "They end as DISCARDED and never run again. Tasks that are running are not touched.",
    ),
    BulkVerb.RUN_NOW: Words(
        "Run now",
        "made due",
        "tasks that wait for a time: those that retry, and those that are queued for later",
        "They run as soon as a worker is free. This does not count as an attempt.",
    ),
}
SHADES: Final = {
    BulkState.WAITING: "queued",
    BulkState.RUNNING: "running",
    BulkState.DONE: "succeeded",
    BulkState.STOPPED: "retrying",
    BulkState.CANARY_FAILED: "dead",
}
