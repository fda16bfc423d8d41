"""What needs attention, in sentences, the worst first. Each says what is wrong and, if a command helps, which one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from urllib.parse import quote

from console import formats
from console.door import PREFIX
from console.overview_figures import Figures
from console.pipeline import DEAD, LATE, OUTBOX, RECEIPTS, SINKS, Level, age_level
from models.status import TaskStatus
from tally.subjects import Subject

WORKERS: Final = f"{PREFIX}/workers"
MOST_NAMED: Final = 3  # of one sort; the rest is counted


@dataclass(frozen=True, slots=True)
class Notice:
    level: Level
    text: str
    command: str = ""
    link: str = ""  # the page about it


def notices(figures: Figures, *, sees_details: bool) -> list[Notice]:
    """Return everything that needs attention. The words of operators and errors are for those who may see them."""
    found = [
        *_unserved(figures),
        *_old_tasks(figures),
        *_paused(figures, sees_details),
        *_alerts(figures),
        *_dead(figures),
        *_events(figures),
        *_sinks(figures),
        *_receipts(figures),
        *_ticks(figures, sees_details),
    ]
    return sorted(found, key=lambda each: each.level is not Level.BAD)


def _unserved(figures: Figures) -> Iterator[Notice]:
    due = {each.queue: 0 for each in figures.stats.kinds}
    for each in figures.stats.kinds:
        due[each.queue] += each.due
    if not figures.workers:
        if total := sum(due.values()):
            text = f"No worker is running, and {_tasks(total)} may start."
            yield Notice(Level.BAD, text, "celery -A tasks worker", WORKERS)
        return
    served = {queue for worker in figures.workers for queue in worker.queues}
    for queue, count in due.items():
        if count and queue not in served:
            text = f"No worker consumes the queue {queue}, and {_tasks(count)} may start."
            yield Notice(Level.BAD, text, f"celery -A tasks worker -Q {queue}", _queue(queue))
    unknown = [(queue, type_) for queue, type_ in figures.unhandled if queue in served]
    for queue, type_ in unknown[:MOST_NAMED]:
        text = f"No worker that runs knows the type {type_}, which waits in the queue {queue}."
        yield Notice(Level.BAD, text, "./manage.py handlers", WORKERS)
    if len(unknown) > MOST_NAMED:
        yield Notice(Level.BAD, f"The same is true of {len(unknown) - MOST_NAMED} more types.", link=WORKERS)


def _old_tasks(figures: Figures) -> Iterator[Notice]:
    oldest: dict[str, timedelta] = {}
    for each in figures.stats.kinds:
        if each.oldest_due is not None:
            oldest[each.queue] = max(each.oldest_due, oldest.get(each.queue, each.oldest_due))
    for queue, age in oldest.items():
        if age >= LATE:
            text = f"A task of the queue {queue} has waited for {formats.duration(age)}, the longest of all."
            yield Notice(age_level(age), text, "./manage.py queues", _queue(queue))


def _paused(figures: Figures, sees_details: bool) -> Iterator[Notice]:
    for each in figures.pauses:
        what = "takes no new tasks" if each.intake else "starts no tasks"
        by = f", by {each.actor}" if sees_details else ""
        reason = f": {each.reason}" if sees_details and each.reason else ""
        since = formats.duration(figures.at - each.since)
        text = f"The queue {each.queue} is paused and {what}, for {since}{by}{reason}."
        yield Notice(Level.WARN, text, f"./manage.py resume {each.queue}", _queue(each.queue))


def _alerts(figures: Figures) -> Iterator[Notice]:
    for each in figures.alerts.values():
        refuses = " New tasks are refused meanwhile." if each.refuses else ""
        text = f"More tasks wait in the queue {each.queue} than BACKLOG_ALERT_THRESHOLD allows.{refuses}"
        level = Level.BAD if each.refuses else Level.WARN
        yield Notice(level, text, "./manage.py queues", _queue(each.queue))


def _dead(figures: Figures) -> Iterator[Notice]:
    dead = next(each for each in figures.stats.statuses if each.status is TaskStatus.DEAD)
    if dead.count:
        about = "" if dead.exact else "About "
        text = f"{about}{_tasks(dead.count)} {'is' if dead.count == 1 else 'are'} dead: run them again or end them."
        yield Notice(Level.WARN, text, "./manage.py requeue-dead --all --dry-run", DEAD)


def _events(figures: Figures) -> Iterator[Notice]:
    failing: dict[str, set[str]] = {}
    for pace in figures.pace:
        if pace.subject is Subject.PUBLISH and pace.per_second > 0:
            failing.setdefault(pace.queue, set()).add(pace.result)
    for each in figures.backlog:
        if each.dead:
            events = f"{each.dead:,} event{'' if each.dead == 1 else 's'}"
            text = f"{events} for {each.destination} {'is' if each.dead == 1 else 'are'} dead."
            yield Notice(Level.WARN, text, "./manage.py outbox --status DEAD", OUTBOX)
        results = failing.get(each.destination, set())
        if "failure" in results and "success" not in results:
            text = f"{each.destination} has refused everything in the last minute, or does not answer."
            yield Notice(Level.BAD, text, "./manage.py outbox --status RETRYING", OUTBOX)
        elif each.oldest_due is not None and each.oldest_due >= LATE:
            text = f"An event for {each.destination} has waited for {formats.duration(each.oldest_due)}."
            yield Notice(age_level(each.oldest_due), text, "./manage.py outbox", OUTBOX)


def _sinks(figures: Figures) -> Iterator[Notice]:
    for each in figures.sinks:
        if each.oldest is not None and each.oldest >= LATE:
            how_many = f"{each.count:,} transaction{'' if each.count == 1 else 's'}"
            text = f"{how_many} of the sink {each.sink} in doubt, for up to {formats.duration(each.oldest)}."
            yield Notice(age_level(each.oldest), text, "./manage.py recover", SINKS)


def _receipts(figures: Figures) -> Iterator[Notice]:
    if figures.accepted is None and figures.takes_receipts:
        yield Notice(Level.BAD, "The receipt log does not answer.", "./manage.py check", RECEIPTS)
    elif figures.accepted and figures.accepted.waiting and figures.accepted.oldest_seconds >= LATE.total_seconds():
        text = f"An accepted message waits to be saved for {formats.duration(figures.accepted.oldest_seconds)}."
        level = age_level(timedelta(seconds=figures.accepted.oldest_seconds))
        yield Notice(level, text, "./manage.py receipts", RECEIPTS)


def _ticks(figures: Figures, sees_details: bool) -> Iterator[Notice]:
    for each in figures.ticks:
        if each.error is not None:
            why = f": {each.error}" if sees_details else "; the log of its worker says why."
            yield Notice(Level.BAD, f"The last run of {each.name} failed{why}", "./manage.py check")
    late = [each for each in figures.ticks if each.is_late and each.error is None]
    never = [each.name for each in late if each.seen is None]
    if never:
        text = f"{', '.join(never).capitalize()} {'was' if len(never) == 1 else 'were'} never seen."
        yield Notice(Level.WARN, text, "celery -A tasks beat")
    for each in late:
        if each.seen is not None:
            text = f"{each.name.capitalize()} was last seen {formats.duration(each.seen)} ago."
            yield Notice(Level.WARN, text, "celery -A tasks beat")


def _tasks(count: int) -> str:
    return f"{count:,} task{'' if count == 1 else 's'}"


def _queue(name: str) -> str:
    return f"{PREFIX}/queues#{quote(name, safe='')}"
