"""A simple model of tasks. `test_task_machine.py` compares the real tasks with it. Time is in hours."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from models.status import TASK_TRANSITIONS, TaskStatus
from tasks import Discard, Permanent, Snooze
from tasks.core.outcomes import Dead, Discarded, Failure, Isolated, Outcome, Released, Retry, Snoozed
from tests.tasks.work import OnPurpose

HOUR: Final = 3600
BACKOFF: Final = (0.5, 1.5)
SNOOZE: Final = 1.5
MAX_ATTEMPTS: Final = 3
BATCHES: Final = {"machine.three": 3, "machine.four": 4}
OPEN: Final = ("QUEUED", "RETRYING")
FAILURE: Final = Failure.of(OnPurpose("no"))
OUTCOMES: Final[dict[str, Outcome]] = {  # for settling by hand
    "fail": Retry(FAILURE),
    "die": Dead(FAILURE),
    "snooze": Snoozed(SNOOZE * HOUR),
    "discard": Discarded("old"),
    "release": Released("late"),
    "isolate": Isolated("lost"),
}
ERRORS: Final = {  # raised by a handler
    "fail": OnPurpose("no"),
    "die": Permanent("never"),
    "snooze": Snooze(SNOOZE * HOUR),
    "discard": Discard("old"),
}


@dataclass
class Row:
    """One task."""

    type: str
    status: str = "QUEUED"
    attempts: int = 0
    due: float = -math.inf
    due_at: datetime | None = None  # from the ledger; it orders the tasks that fill a batch
    isolated: bool = False
    token: uuid.UUID | None = None
    changes: int = 1
    effects: int = 0

    def is_claimed(self, token: uuid.UUID) -> None:
        self.becomes("RUNNING")
        self.token = token

    def settles(self, outcome: str, now: int) -> None:
        match outcome:
            case "succeed":
                self.effects += 1
                self.becomes("SUCCEEDED", due=-math.inf)
            case "fail":
                self.attempts += 1
                if self.attempts == MAX_ATTEMPTS:
                    self.becomes("DEAD", due=-math.inf)
                else:
                    self.becomes("RETRYING", due=now + BACKOFF[min(self.attempts, len(BACKOFF)) - 1])
            case "die":
                self.attempts += 1
                self.becomes("DEAD", due=-math.inf)
            case "snooze":
                self.becomes("RETRYING", due=now + SNOOZE)
            case "discard":
                self.becomes("DISCARDED")
            case "release":
                self.becomes("QUEUED")
            case "isolate":
                self.isolated = True
                self.becomes("RETRYING", due=now)
            case "requeue":
                self.attempts = 0
                self.becomes("QUEUED", due=-math.inf)

    def becomes(self, status: str, *, due: float | None = None) -> None:
        self.status, self.token = status, None
        self.changes += 1
        self.due = self.due if due is None else due


def admitted(
    rows: Mapping[uuid.UUID, Row], ids: list[uuid.UUID], locked: set[uuid.UUID], now: int
) -> tuple[set[uuid.UUID], list[uuid.UUID]]:
    """Return the tasks that a claim of `ids` must choose, and those of `ids` that are left for the next claim.

    It takes tasks of one kind from `ids`, then fills the batch with the longest waiting ones of that kind.
    """
    due = {i for i, row in rows.items() if row.status in OPEN and row.due <= now}
    own = [i for i in ids if i in due]
    if not own:
        return set(), []
    first = rows[min(own, key=lambda i: (rows[i].isolated, ids.index(i)))]
    most = 1 if first.isolated else BATCHES[first.type]
    mine = [i for i in own if (rows[i].type, rows[i].isolated) == (first.type, first.isolated)][:most]
    others = [i for i in due - set(ids) - locked if rows[i].type == first.type and not rows[i].isolated]
    others.sort(key=lambda i: (_waits_since(rows[i]), i))
    filled = [] if first.isolated else others[: most - len(mine)]
    return {*mine, *filled} - locked, [i for i in own if i not in mine]


def check_history(transitions: list[str]) -> None:
    """Assert that each transition ("FROM>TO") is legal and begins where the last one ended."""
    before = ""
    for transition in transitions:
        source, _, target = transition.partition(">")
        assert source == before
        assert TaskStatus(target) in TASK_TRANSITIONS[TaskStatus(source) if source else None]
        before = target


def _waits_since(row: Row) -> float:
    return row.due_at.timestamp() if row.due_at else -math.inf
