"""Explain why a task is not running: every reason that holds, the most important first.

A final or running task has one reason. An open task may wait for its due time, its turn, its limit, its queue, a
worker, a handler, or its wake-up: in the outbox, in the broker, or lost. The broker is asked for open tasks only; if it
is unreachable, that is one more reason.
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
from tasks.operations.task_details import Blocker, Details, UnsentWakeup, WaitedLimit

PATIENCE_SECONDS: Final = 1.0
SHOWN_WORKERS: Final = 3


class ReasonCode(StrEnum):
    """A reason for programs."""

    FINAL = "final"
    RUNNING = "running"
    WORKER_LOST = "worker_lost"
    EXPIRED = "expired"
    NOT_DUE = "not_due"
    NOT_ITS_TURN = "not_its_turn"
    OVER_LIMIT = "over_limit"
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
    """Why a task is not running: a code for programs and a sentence for people."""

    code: ReasonCode
    message: str


@dataclass(frozen=True, slots=True)
class QueueState:
    """What the broker and the workers report about a queue."""

    waiting: int  # messages that no worker has taken
    consumers: frozenset[str] | None  # the workers that consume it; None if workers cannot be asked


Found = tuple[ReasonCode, str]


def read_queue(queue: str) -> QueueState:
    """Ask the broker and the workers, which have a second to answer. Workers of Kafka cannot be asked.

    Raises Unreachable if the broker does not answer.
    """
    if current().ingest_queue == "kafka":
        from tasks.kafka.lag import progress  # noqa: PLC0415 - loads Kafka's client

        return QueueState(progress(current()).waiting, None)
    waiting = broker.depths([queue])[queue]
    consumed = broker.consumed(patience_seconds=PATIENCE_SECONDS)
    return QueueState(waiting, frozenset(worker for worker, queues in consumed.items() if queue in queues))


def reasons(
    details: Details,
    settings: Settings,
    *,
    known_types: Collection[str],
    read_queue: Callable[[str], QueueState] = read_queue,
) -> list[Reason]:
    """Return at least one reason."""
    status = details.task.status
    if status in FINAL:
        return [Reason(ReasonCode.FINAL, _final(details))]
    if status == TaskStatus.RUNNING:
        return [Reason(*_running(details))]
    found = list(_before_its_queue(details, settings, known_types))
    try:
        found += _in_its_queue(details, settings, read_queue(details.task.queue))
    except Unreachable as error:
        message = f"{error.message.rstrip('.')}. The task will be woken when the broker is back."
        found.append((ReasonCode.BROKER_UNREACHABLE, message))
    return [Reason(*each) for each in found]


def _final(details: Details) -> str:
    task = details.task
    since = f"It has been {task.status} since {_at(task.finished_at)}"
    if task.status == TaskStatus.DISCARDED and task.expires_at and details.transitions:
        return f"{since}: {details.transitions[-1].message}; it was to start before {_at(task.expires_at)}."
    return f"{since}."


def _running(details: Details) -> Found:
    lease = details.lease
    if lease is None:
        return ReasonCode.WORKER_LOST, "It is RUNNING without a lease: its worker has just settled it or lost it."
    until = _at(lease.lease_until)
    if lease.lease_until <= details.now:
        return (
            ReasonCode.WORKER_LOST,
            f"The lease of its worker {lease.holder} expired at {until}; it will be reclaimed.",
        )
    since = f"It has been running since {_at(lease.claimed_at)}, held by {lease.holder}"
    return ReasonCode.RUNNING, f"{since} (lease until {until}, renewed while it runs)."


def _before_its_queue(details: Details, settings: Settings, known_types: Collection[str]) -> Iterator[Found]:
    task, pause = details.task, details.pause
    if task.expires_at is not None and task.expires_at <= details.now:
        yield ReasonCode.EXPIRED, f"It expired at {_at(task.expires_at)}; the next reclaim discards it."
    if not _is_due(details):
        due_at = task.next_retry_at or details.now
        yield ReasonCode.NOT_DUE, f"It is due at {_at(due_at)}, in {_duration(due_at - details.now)}."
    if details.blocker:
        yield ReasonCode.NOT_ITS_TURN, _behind(details.blocker, task.partition_key)
    if details.limit:
        yield ReasonCode.OVER_LIMIT, _over_limit(details.limit, task.type)
    if pause:
        why = f": {pause.reason}" if pause.reason else ""
        since = f"was paused at {_at(pause.created_at)} by {pause.actor}"
        resume = f"`manage.py resume {task.queue}` lets it run"
        yield ReasonCode.QUEUE_PAUSED, f"Its queue {task.queue!r} {since}{why}; {resume}."
    if task.queue not in settings.ingest_queues:
        known = ", ".join(settings.ingest_queues)
        yield ReasonCode.UNKNOWN_QUEUE, f"Its queue {task.queue!r} is not in INGEST_QUEUES ({known})."
    if missing := _missing_handler(details, known_types):
        yield ReasonCode.UNKNOWN_HANDLER, missing


def _missing_handler(details: Details, known_types: Collection[str]) -> str | None:
    """Return a sentence if no live worker can run the task. If no worker is registered, ask this process instead."""
    type_, queue = details.task.type, details.task.queue
    add = "Add the module with its handler to INGEST_HANDLERS"
    if not details.live_workers:
        return None if type_ in known_types else f"There is no handler for {type_!r} here. {add}."
    knowing = [each for each in details.live_workers if type_ in each.types]
    if not knowing:
        return f"No live worker knows the type {type_!r}. {add} and restart the workers."
    if not any(queue in each.queues for each in knowing):
        names = ", ".join(each.worker for each in knowing[:SHOWN_WORKERS])
        return f"No live worker that consumes the queue {queue!r} knows the type {type_!r}; {names} knows it."
    return None


def _in_its_queue(details: Details, settings: Settings, queue: QueueState) -> Iterator[Found]:
    if queue.consumers is not None and not queue.consumers:
        missing = f"No worker that answered within {PATIENCE_SECONDS:g} s consumes its queue {details.task.queue!r}"
        yield ReasonCode.NO_WORKER, f"{missing}: start `celery -A tasks worker`."
    needs_no_wakeup = details.limit and details.task.last_wakeup_at is None  # it gets one when its limit allows it
    if _is_due(details) and not details.blocker and not details.pause and not needs_no_wakeup:
        yield _wakeup(details, settings, queue)


def _is_due(details: Details) -> bool:
    return details.task.next_retry_at is None or details.task.next_retry_at <= details.now


def _behind(blocker: Blocker, key: str | None) -> str:
    ahead = f"{blocker.ahead} tasks are" if blocker.ahead > 1 else "1 task is"
    first = f"the first is {blocker.task_id} ({blocker.type}), which is {blocker.status}"
    if blocker.status == TaskStatus.DEAD:
        first += f": `manage.py requeue-dead --id {blocker.task_id}` or discard-dead unblocks the key"
    return f"{ahead} ahead of it in partition key {key!r}; {first}."


def _over_limit(limit: WaitedLimit, type: str) -> str:
    whose = f"{type} for {limit.limit_by}={limit.limit_key}" if limit.limit_by and limit.limit_key else type
    allowed = []
    if limit.max_running is not None:
        allowed.append(f"{limit.running} of {limit.max_running} of {whose} are running")
    if limit.rate is not None:
        allowed.append(f"{limit.rate} of {whose} may start")
    ahead = f"{limit.ahead} tasks wait" if limit.ahead != 1 else "1 task waits"
    what = ", and ".join(allowed) or f"{type} had a limit when it began to wait, and will be woken"
    return f"It waits for its limit since {_at(limit.limited_at)}: {what}. {ahead} before it."


def _wakeup(details: Details, settings: Settings, queue: QueueState) -> Found:
    task = details.task
    if details.wakeups:
        return ReasonCode.WAKEUP_IN_OUTBOX, _unsent(details.wakeups[-1], details.now)
    woken_at = task.last_wakeup_at or task.created_at
    if queue.waiting:
        place = f"behind at most {queue.waiting:,} messages" if queue.waiting > 1 else "as its only message"
        waits = f"It was woken at {_at(woken_at)}; the wake-up waits in the broker's queue, {place}."
        return ReasonCode.WAKEUP_IN_BROKER, waits
    # As `tasks/recovery/lost_wakeups.py` computes it: the grace doubles with each wake-up of a task that still waits.
    waits_since = max(task.next_retry_at or task.created_at, task.updated_at)
    grace = timedelta(milliseconds=settings.ingest_wakeup_grace_ms)
    again_at = woken_at + grace + max(woken_at - waits_since, timedelta())
    when = f"at {_at(again_at)}" if again_at > details.now else "by the next reclaim"
    lost = f"The broker's queue is empty: its wake-up of {_at(woken_at)} was taken by a worker or is lost."
    return ReasonCode.WAKEUP_LOST, f"{lost} It will be woken again {when}."


def _unsent(wakeup: UnsentWakeup, now: datetime) -> str:
    if wakeup.next_retry_at is not None and wakeup.next_retry_at > now:
        return f"Its wake-up {wakeup.id} will be published at {_at(wakeup.next_retry_at)}."
    if wakeup.locked_by is not None and wakeup.lease_until is not None and wakeup.lease_until > now:
        return f"Its wake-up {wakeup.id} is being published by {wakeup.locked_by}."
    since = _at(wakeup.next_retry_at or wakeup.created_at)
    failed = f"{wakeup.attempt_count} failed: {(wakeup.last_error or '').partition(chr(10))[0]}"
    more = f" ({failed})." if wakeup.attempt_count else "; the relay will publish it."
    return f"Its wake-up {wakeup.id} has been waiting in the outbox since {since}{more}"


def _at(at: datetime | None) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if at else "?"


def _duration(wait: timedelta) -> str:
    seconds = wait.total_seconds()
    return f"{seconds:.1f} s" if seconds < 120 else str(timedelta(seconds=int(seconds)))
