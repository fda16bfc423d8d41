"""Draw the history of a task: the states that it was in, how long each time, and the way through the state machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from console.formats import duration
from models.status import TaskStatus
from tasks.operations.listing import FINAL
from tasks.operations.task_details import Transition

FIRST_SHOWN: Final = 5
LATEST_SHOWN: Final = 45
WIDTH: Final = 92  # of the box of a state
HEIGHT: Final = 50
# The left upper corner of each box, in a picture that is 364 wide.
PLACES: Final = {
    TaskStatus.QUEUED: (16, 8),
    TaskStatus.RUNNING: (138, 8),
    TaskStatus.SUCCEEDED: (260, 8),
    TaskStatus.DISCARDED: (16, 136),
    TaskStatus.RETRYING: (138, 136),
    TaskStatus.DEAD: (260, 136),
}
# Each way from state to state: its line, and where the number of times is written.
WAYS: Final[dict[tuple[TaskStatus, TaskStatus], tuple[str, int, int]]] = {
    (TaskStatus.QUEUED, TaskStatus.RUNNING): ("M108,26 H136", 122, 20),
    (TaskStatus.RUNNING, TaskStatus.QUEUED): ("M138,44 H110", 122, 58),
    (TaskStatus.RUNNING, TaskStatus.SUCCEEDED): ("M230,33 H258", 244, 27),
    (TaskStatus.RUNNING, TaskStatus.RETRYING): ("M170,58 V134", 156, 100),
    (TaskStatus.RETRYING, TaskStatus.RUNNING): ("M198,136 V60", 212, 100),
    (TaskStatus.RUNNING, TaskStatus.DEAD): ("M222,58 L285,134", 268, 98),
    (TaskStatus.RUNNING, TaskStatus.DISCARDED): ("M146,58 L84,134", 100, 98),
    (TaskStatus.QUEUED, TaskStatus.DISCARDED): ("M44,58 V134", 32, 100),
    (TaskStatus.RETRYING, TaskStatus.DISCARDED): ("M138,161 H110", 124, 155),
    (TaskStatus.DEAD, TaskStatus.DISCARDED): ("M290,186 V198 H62 V188", 176, 195),
    (TaskStatus.DEAD, TaskStatus.QUEUED): ("M322,186 V208 H5 V33 H14", 340, 204),
}
# Drawn even if the task did not take them, so that the picture shows where it can go from here.
USUAL: Final = (
    (TaskStatus.QUEUED, TaskStatus.RUNNING),
    (TaskStatus.RUNNING, TaskStatus.SUCCEEDED),
    (TaskStatus.RUNNING, TaskStatus.RETRYING),
    (TaskStatus.RETRYING, TaskStatus.RUNNING),
    (TaskStatus.RUNNING, TaskStatus.DEAD),
)


@dataclass(frozen=True, slots=True)
class Visit:
    """A time that the task spent in one state, and the change that began it."""

    status: TaskStatus
    since: datetime
    lasted: timedelta | None  # None: it is over with this state
    is_now: bool
    run: int | None  # a number for each time that it ran
    attempt: int | None  # the number of failures, if the change before was one
    actor: str | None
    message: str | None
    share: float  # of the longest visit, from 0 to 100


@dataclass(frozen=True, slots=True)
class State:
    """A box of the picture."""

    status: TaskStatus
    x: int
    y: int
    visits: int
    text: str
    is_now: bool


@dataclass(frozen=True, slots=True)
class Way:
    """A line of the picture."""

    line: str
    x: int
    y: int
    times: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the page shows of a history. `left_out` visits lie between the first ones and the latest ones.

    If `counted` is not None, only so many of the latest changes were read and counted.
    """

    first: list[Visit]
    left_out: int
    latest: list[Visit]
    states: list[State]
    ways: list[Way]
    height: int  # of the picture
    summary: str
    counted: int | None


def draw(transitions: Sequence[Transition], now: datetime, *, older: int = 0) -> Timeline:
    """Return the timeline of a task. The transitions are its history, oldest first, after `older` ones."""
    visits = _visits(transitions, now, is_whole=not older)
    cut = FIRST_SHOWN if len(visits) > FIRST_SHOWN + LATEST_SHOWN else len(visits)
    cut = 0 if older else cut
    latest = visits[max(cut, len(visits) - LATEST_SHOWN) :]
    states = _states(visits)
    words = [f"{each.status.lower()} {each.text}".strip() for each in states if each.visits]
    return Timeline(
        visits[:cut],
        older + len(visits) - cut - len(latest),
        latest,
        states,
        _ways(transitions),
        214 if any(each.from_status == TaskStatus.DEAD for each in transitions) else 190,
        f"The way through the states so far: {', '.join(words)}." if words else "No history.",
        len(visits) if older else None,
    )


def _visits(transitions: Sequence[Transition], now: datetime, *, is_whole: bool) -> list[Visit]:
    ends = [*(each.created_at for each in transitions[1:]), now]
    lengths = [
        None if each.to_status in FINAL and place == len(transitions) - 1 else max(timedelta(), end - each.created_at)
        for place, (each, end) in enumerate(zip(transitions, ends, strict=False))
    ]
    longest = max((each for each in lengths if each), default=timedelta(seconds=1))
    runs, failures, found = 0, 0 if is_whole else transitions[0].attempt_count, []
    for place, (each, length) in enumerate(zip(transitions, lengths, strict=True)):
        runs += each.to_status == TaskStatus.RUNNING
        has_failed = each.attempt_count > failures
        failures = each.attempt_count
        found.append(
            Visit(
                TaskStatus(each.to_status),
                each.created_at,
                length,
                place == len(transitions) - 1,
                runs if is_whole and each.to_status == TaskStatus.RUNNING else None,
                failures if has_failed else None,
                each.actor,
                each.message,
                0.0 if length is None else round(100 * (length / longest), 1),
            )
        )
    return found


def _states(visits: Sequence[Visit]) -> list[State]:
    found = []
    for status, (x, y) in PLACES.items():
        own = [each for each in visits if each.status is status]
        spent = sum((each.lasted for each in own if each.lasted is not None), timedelta())
        times = f"{len(own)}×, " if len(own) > 1 else ""
        has_end = bool(own) and own[-1].lasted is None
        text = "" if not own or (has_end and not spent) else f"{times}{duration(spent)}"
        found.append(State(status, x, y, len(own), text, any(each.is_now for each in own)))
    return found


def _ways(transitions: Sequence[Transition]) -> list[Way]:
    """Return the lines: first those that the task has not taken, so that the others are drawn over them."""
    taken = Counter((each.from_status, each.to_status) for each in transitions if each.from_status is not None)
    shown = [key for key in WAYS if key in taken or key in USUAL]
    return sorted((Way(*WAYS[key], taken[key]) for key in shown), key=lambda each: each.times > 0)
