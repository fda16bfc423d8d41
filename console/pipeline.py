"""What the picture of the pipeline says: the stations of a task, what is in each, and how much moves between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final

from console import formats
from console.door import PREFIX
from console.overview_feed import Arrivals
from console.overview_figures import Figures
from console.task_search import TASKS, tasks_path
from models.status import TaskStatus
from outbox.backlog import Backlog
from tally.subjects import Subject
from tasks.operations.stats import StatusCount

# Ages from which something is marked. The second one is that of the alert CeleriacOldestDueTask.
LATE: Final = timedelta(minutes=1)
TOO_LATE: Final = timedelta(minutes=5)
MOST_ROWS: Final = 4
# The pages behind the stations.
DEAD: Final = f"{PREFIX}/dead"
OUTBOX: Final = f"{PREFIX}/outbox"
SINKS: Final = f"{PREFIX}/sinks"
RECEIPTS: Final = f"{PREFIX}/receipts"
RAN: Final = ("succeeded", "retry", "dead", "discarded", "snoozed", "released")  # results of deliveries that ran


class Level(StrEnum):
    """How something is: the class of its colour. The words beside it say the same."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text in a station; with a figure at its end in a list."""

    text: str
    figure: str = ""
    level: Level = Level.OK


@dataclass(frozen=True, slots=True)
class Station:
    """A box of the picture, which links to a page. `status` is that of the tasks that are counted in it."""

    key: str
    title: str
    figure: str
    link: str
    lines: tuple[Line, ...] = ()
    level: Level = Level.OK
    status: TaskStatus | None = None


@dataclass(frozen=True, slots=True)
class Flow:
    """An arrow of the picture. `pace` is empty if it is not known."""

    start: str
    end: str
    pace: str = ""
    is_moving: bool = False
    level: Level = Level.OK


def picture(figures: Figures, arrivals: Arrivals) -> tuple[list[Station], list[Flow]]:
    """Return the stations and the flows between them."""
    stations = [
        _accepted(figures),
        _saved(figures),
        _queued(figures),
        _running(figures),
        _status(figures, TaskStatus.SUCCEEDED, "Succeeded", _discarded(figures)),
        _destinations(figures),
        _outbox(figures),
        _status(figures, TaskStatus.RETRYING, "Retrying", [Line("wait for another try")]),
        _dead(figures),
        _sinks(figures),
    ]
    tasks = {each: _pace(figures, Subject.TASK, each) for each in RAN}
    sent = _pace(figures, Subject.PUBLISH, "success")
    flows = [
        _flow("accepted", "saved", arrivals.receipts if figures.takes_receipts else None),
        _flow("saved", "queued", arrivals.tasks),
        _flow("queued", "running", sum(tasks.values())),
        _flow("running", "succeeded", tasks["succeeded"]),
        _flow("running", "retrying", tasks["retry"] + tasks["snoozed"], Level.WARN),
        Flow("retrying", "queued", is_moving=tasks["retry"] > 0),
        _flow("running", "dead", tasks["dead"], Level.BAD),
        Flow("running", "sinks"),
        Flow("saved", "outbox", is_moving=sent > 0),
        _flow("outbox", "destinations", sent),
    ]
    return stations, flows


def age_level(age: timedelta | None) -> Level:
    if age is None or age < LATE:
        return Level.OK
    return Level.WARN if age < TOO_LATE else Level.BAD


def worst(levels: Iterable[Level]) -> Level:
    found = set(levels)
    return Level.BAD if Level.BAD in found else Level.WARN if Level.WARN in found else Level.OK


def _accepted(figures: Figures) -> Station:
    found = figures.accepted
    if found is None:
        level = Level.BAD if figures.takes_receipts else Level.OFF
        return Station(
            "accepted",
            "Accepted",
            "?",
            RECEIPTS,
            (Line("the receipt log", level=level), Line("does not answer", level=level)),
            level,
        )
    if not figures.takes_receipts and not found.waiting:
        return Station("accepted", "Accepted", "0", RECEIPTS, (Line("receipts are"), Line("switched off")), Level.OFF)
    level = age_level(timedelta(seconds=found.oldest_seconds)) if found.waiting else Level.OK
    oldest = f"oldest {formats.duration(found.oldest_seconds)}" if found.waiting else "all are saved"
    return Station(
        "accepted",
        "Accepted",
        formats.number(found.waiting),
        RECEIPTS,
        (Line("wait to be saved"), Line(oldest, level=level)),
        level,
    )


def _saved(figures: Figures) -> Station:
    counts = figures.stats.statuses
    total, is_exact = sum(each.count for each in counts), all(each.exact for each in counts)
    scheduled = sum(each.scheduled for each in figures.stats.kinds)
    lines = (Line("tasks in the ledger"), Line(f"{formats.number(scheduled)} for later"))
    return Station("saved", "Saved", f"{'' if is_exact else '≈ '}{formats.number(total)}", TASKS, lines)


def _queued(figures: Figures) -> Station:
    due = sum(each.due for each in figures.stats.kinds)
    queued = _count(figures, TaskStatus.QUEUED).count
    oldest = max((each.oldest_due for each in figures.stats.kinds if each.oldest_due), default=None)
    level = age_level(oldest)
    return _status(
        figures,
        TaskStatus.QUEUED,
        "Queued",
        [
            Line(f"{formats.number(due)} {'due, with retries' if due > queued else 'may start now'}"),
            Line(f"oldest {formats.duration(oldest)}" if oldest else "nothing waits", level=level),
        ],
        level,
    )


def _running(figures: Figures) -> Station:
    processes = sum(each.processes or 0 for each in figures.workers)
    has_no_worker = not figures.workers
    level = Level.BAD if has_no_worker and any(each.due for each in figures.stats.kinds) else Level.OK
    workers = f"{len(figures.workers)} worker{'' if len(figures.workers) == 1 else 's'}"
    lines = [
        Line("no worker is running" if has_no_worker else workers, level=Level.WARN if has_no_worker else Level.OK)
    ]
    if processes:
        lines.append(Line(f"{processes} process{'' if processes == 1 else 'es'}"))
    return _status(figures, TaskStatus.RUNNING, "Running", lines, level)


def _dead(figures: Figures) -> Station:
    dead = _count(figures, TaskStatus.DEAD).count
    lines = [Line("wait for a person", level=Level.WARN)] if dead else [Line("none")]
    return _status(figures, TaskStatus.DEAD, "Dead letters", lines, Level.WARN if dead else Level.OK)


def _discarded(figures: Figures) -> list[Line]:
    return [Line(f"{formats.count(_count(figures, TaskStatus.DISCARDED))} discarded")]


def _status(
    figures: Figures, status: TaskStatus, title: str, lines: Iterable[Line], level: Level = Level.OK
) -> Station:
    key = "dead" if status is TaskStatus.DEAD else status.lower()
    link = DEAD if status is TaskStatus.DEAD else tasks_path(status=status.lower())
    return Station(key, title, formats.count(_count(figures, status)), link, tuple(lines), level, status)


def _outbox(figures: Figures) -> Station:
    due, later = (sum(getattr(each, name) for each in figures.backlog) for name in ("due", "scheduled"))
    oldest = max((each.oldest_due for each in figures.backlog if each.oldest_due), default=None)
    level = age_level(oldest)
    lines = (
        Line(f"oldest {formats.duration(oldest)}" if oldest else "all events are sent", level=level),
        Line(f"{formats.number(later)} for later"),
    )
    return Station("outbox", "Outbox", formats.number(due), OUTBOX, lines, level)


def _destinations(figures: Figures) -> Station:
    paces = {each.queue for each in figures.pace if each.subject is Subject.PUBLISH}
    known = {each.destination: each for each in figures.backlog}
    found = sorted(known.keys() | paces, key=lambda name: (-known.get(name, Backlog(name)).due, name))
    lines = []
    for name in found:
        each = known.get(name, Backlog(name))
        level = Level.BAD if each.dead else age_level(each.oldest_due)
        lines.append(Line(name, f"{formats.number(each.dead)} dead" if each.dead else formats.number(each.due), level))
    level = worst(line.level for line in lines)
    return Station("destinations", "Destinations", "", OUTBOX, _listed(lines, "none yet"), level)


def _sinks(figures: Figures) -> Station:
    lines = [
        Line(each.sink, f"{formats.number(each.count)} in doubt" if each.count else "clear", age_level(each.oldest))
        for each in figures.sinks
    ]
    level = worst(line.level for line in lines)
    return Station("sinks", "Sinks", "", SINKS, _listed(lines, "none configured"), level)


def _listed(lines: list[Line], empty: str) -> tuple[Line, ...]:
    """Return as many lines as there is room for."""
    if not lines:
        return (Line(empty),)
    if len(lines) <= MOST_ROWS:
        return tuple(lines)
    rest = lines[MOST_ROWS - 1 :]
    return (*lines[: MOST_ROWS - 1], Line(f"and {len(rest)} more", level=worst(line.level for line in rest)))


def _count(figures: Figures, status: TaskStatus) -> StatusCount:
    return next(each for each in figures.stats.statuses if each.status is status)


def _pace(figures: Figures, subject: Subject, result: str) -> float:
    return sum(each.per_second for each in figures.pace if each.subject is subject and each.result == result)


def _flow(start: str, end: str, per_second: float | None, level: Level = Level.OK) -> Flow:
    is_moving = bool(per_second)
    return Flow(start, end, formats.rate(per_second), is_moving, level if is_moving else Level.OK)
