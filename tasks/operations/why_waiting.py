"""Why a task is not running: every reason that holds, the first one first.

A final task needs none but that. One that is open may wait for its time, for its queue, for a worker, for its handler,
or for its wake-up: in the outbox, in the broker, or lost and to be woken again (P8). The broker is asked for a task that is
open, and a broker that does not answer is a reason of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from models.errors import Unreachable
from models.status import TaskStatus
from settings import Settings, current
from tasks import broker
from tasks.operations.listing import FINAL
from tasks.operations.task_details import Blocker, Details, UnsentWakeup

PATIENCE_SECONDS: Final = 1.0


class Why(StrEnum):
    """For programs."""

    FINAL = "final"
    RUNNING = "running"
    WORKER_LOST = "worker_lost"
    NOT_DUE = "not_due"
    NOT_ITS_TURN = "not_its_turn"
    QUEUE_PAUSED = "queue_paused"
    UNKNOWN_QUEUE = "unknown_queue"
    UNKNOWN_HANDLER = "unknown_handler"
    BROKER_UNREACHABLE = "broker_unreachable"
    NO_WORKER = "no_worker"
    WAKEUP_IN_OUTBOX = "wakeup_in_outbox"
    WAKEUP_IN_BROKER = "wakeup_in_broker"
    WAKEUP_LOST = "wakeup_lost"


@dataclass(frozen=True, slots=True)
class Reason:
    code: Why
    message: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What the broker and the workers say about a queue."""

    waiting: int  # messages that no worker has taken
    consumers: frozenset[str] | None  # the workers that consume it; None: they cannot be asked


Look = Callable[[str], Seen]


def look(queue: str) -> Seen:
    """Raises Unreachable. Workers have a second to answer; those of Kafka answer nobody."""
    if current().ingest_queue == "kafka":
        from tasks.kafka.lag import progress  # noqa: PLC0415 - loads Kafka's client

        return Seen(progress(current()).waiting, None)
    waiting = broker.depths([queue])[queue]
    consumed = broker.consumed(patience_seconds=PATIENCE_SECONDS)
    return Seen(waiting, frozenset(worker for worker, queues in consumed.items() if queue in queues))


def reasons(details: Details, settings: Settings, *, known_types: Collection[str], look: Look = look) -> list[Reason]:
    """Never empty."""
    status = details.task.status
    if status in FINAL:
        return [Reason(Why.FINAL, f"It is {status}, since {_at(details.task.finished_at)}.")]
    if status == TaskStatus.RUNNING:
        return [_running(details)]
    return list(_open(details, settings, known_types, look))


def _running(details: Details) -> Reason:
    lease = details.lease
    if lease is None:
        return Reason(Why.WORKER_LOST, "It is RUNNING and no lease covers it: its worker has just settled or lost it.")
    held = f"held by {lease.holder}"
    if lease.lease_until <= details.now:
        sentence = f"It was {held}, whose lease ran out at {_at(lease.lease_until)}: reclaim takes it over."
        return Reason(Why.WORKER_LOST, sentence)
    since = f"It is running since {_at(lease.claimed_at)}, {held}"
    return Reason(Why.RUNNING, f"{since} (lease until {_at(lease.lease_until)}, renewed while it runs).")


def _open(details: Details, settings: Settings, known_types: Collection[str], look: Look) -> Iterator[Reason]:
    task = details.task
    is_due = task.next_retry_at is None or task.next_retry_at <= details.now
    if task.next_retry_at is not None and not is_due:
        wait = _duration(task.next_retry_at - details.now)
        yield Reason(Why.NOT_DUE, f"It is not due before {_at(task.next_retry_at)}, in {wait}.")
    if details.blocker:
        yield _not_its_turn(details.blocker, task.partition_key)
    if details.pause:
        said = f": {details.pause.reason}" if details.pause.reason else ""
        since = f"since {_at(details.pause.created_at)} by {details.pause.actor}"
        yield Reason(Why.QUEUE_PAUSED, f"Its queue {task.queue!r} is paused, {since}{said}.")
    if task.queue not in settings.ingest_queues:
        known = ", ".join(settings.ingest_queues)
        yield Reason(Why.UNKNOWN_QUEUE, f"There is no queue {task.queue!r} for tasks: INGEST_QUEUES names {known}.")
    if task.type not in known_types:
        sentence = f"There is no handler for {task.type!r} here: INGEST_HANDLERS names the modules with handlers."
        yield Reason(Why.UNKNOWN_HANDLER, sentence)
    try:
        seen = look(task.queue)
    except Unreachable as error:
        yield Reason(Why.BROKER_UNREACHABLE, f"{error.message.rstrip('.')}. It is woken when the broker is back.")
        return
    if seen.consumers is not None and not seen.consumers:
        within = f"No worker that answered within {PATIENCE_SECONDS:g} s"
        yield Reason(Why.NO_WORKER, f"{within} consumes its queue {task.queue!r}: start `celery -A tasks worker`.")
    if is_due and not details.blocker:
        yield _wakeup(details, settings, seen)


def _not_its_turn(blocker: Blocker, key: str | None) -> Reason:
    ahead = f"behind {blocker.ahead} others" if blocker.ahead > 1 else "behind one other"
    sentence = (
        f"It is {ahead} of its partition key {key!r}; the first is {blocker.task_id} ({blocker.type}), {blocker.status}"
    )
    if blocker.status == TaskStatus.DEAD:
        sentence += f", which holds the key until `manage.py requeue-dead --id {blocker.task_id}` or discard-dead"
    return Reason(Why.NOT_ITS_TURN, f"{sentence}.")


def _wakeup(details: Details, settings: Settings, seen: Seen) -> Reason:
    task = details.task
    if details.wakeups:
        return Reason(Why.WAKEUP_IN_OUTBOX, _unsent(details.wakeups[-1], details.now))
    last_wakeup_at = task.last_wakeup_at or task.created_at
    if seen.waiting:
        behind = f"behind at most {seen.waiting:,} messages" if seen.waiting > 1 else "as its only message"
        return Reason(
            Why.WAKEUP_IN_BROKER, f"It was woken at {_at(last_wakeup_at)} and waits in the broker's queue, {behind}."
        )
    again = _woken_again_at(details, settings)
    lost = f"Its wake-up of {_at(last_wakeup_at)} is in a worker's hands, or lost"
    when = f"at {_at(again)}" if again > details.now else "by the next reclaim"
    return Reason(Why.WAKEUP_LOST, f"{lost}: the broker's queue is empty. It will be woken again {when}.")


def _unsent(wakeup: UnsentWakeup, now: datetime) -> str:
    if wakeup.next_retry_at is not None and wakeup.next_retry_at > now:
        return f"Its wake-up {wakeup.id} goes out at {_at(wakeup.next_retry_at)}."
    if wakeup.locked_by is not None and wakeup.lease_until is not None and wakeup.lease_until > now:
        return f"Its wake-up {wakeup.id} is just being published by {wakeup.locked_by}."
    waits = f"Its wake-up {wakeup.id} waits in the outbox since {_at(wakeup.next_retry_at or wakeup.created_at)}"
    failed = f"{wakeup.attempt_count} failed: {(wakeup.last_error or '').partition(chr(10))[0]}"
    return f"{waits} ({failed})." if wakeup.attempt_count else f"{waits}: the relay publishes it."


def _woken_again_at(details: Details, settings: Settings) -> datetime:
    """As `tasks/recovery/lost_wakeups.py` reckons: the grace doubles with each wake-up of a task that still waits."""
    task = details.task
    last_wakeup_at = task.last_wakeup_at or task.created_at
    waits_since = max(task.next_retry_at or task.created_at, task.updated_at)
    return (
        last_wakeup_at
        + timedelta(milliseconds=settings.ingest_wakeup_grace_ms)
        + max(last_wakeup_at - waits_since, timedelta())
    )


def _at(at: datetime | None) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if at else "?"


def _duration(wait: timedelta) -> str:
    seconds = wait.total_seconds()
    return f"{seconds:.1f} s" if seconds < 120 else str(timedelta(seconds=int(seconds)))
