"""The custody line: who is responsible for a task now, hop by hop, from its row to its receipt.

row → outbox → broker → lease → effect → receipt

done      the task has passed this hop
now       it is here
later     it has not come here
unknown   the server that knows did not answer in time
missing   it should be here, and is not: a dead or lost wake-up, a lost lease, an effect that cannot be known
unneeded  this task does not use the hop
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from console.formats import duration, moment, number
from models.receipts import Level
from models.status import EventStatus, TaskStatus
from receipts.receipt import Receipt
from sinks.contract import Effect, EffectState
from tasks.operations.listing import FINAL
from tasks.operations.task_details import Details, UnsentWakeup
from tasks.operations.task_outbox import TaskEvent


class HopState(StrEnum):
    """How a hop is drawn."""

    DONE = "done"
    NOW = "now"
    LATER = "later"
    UNKNOWN = "unknown"
    MISSING = "missing"
    UNNEEDED = "unneeded"


@dataclass(frozen=True, slots=True)
class Hop:
    """One hop of the custody line."""

    name: str
    state: HopState
    sentence: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the custody line is made of. Everything in it may be shown to the visitor."""

    details: Details
    events: Sequence[TaskEvent]
    is_unreachable: bool  # the broker was, when a wake-up for the queue was last tried
    waiting: int | None  # messages in the broker's queue; None: not known
    sinks: Sequence[str]
    effects: Sequence[Effect | None]  # None: the sink has not answered
    receipt: Receipt | None
    grace: timedelta  # after which a wake-up counts as lost


NO_SINK: Final = "Its type uses no sink."
COMMITTED: Final = "Writes of a transactional handler were committed with SUCCEEDED."
ROLLED_BACK: Final = "Writes of a transactional handler were rolled back."


def custody(seen: Evidence) -> list[Hop]:
    """Return the six hops."""
    outbox = _outbox(seen)
    return [
        Hop("Row", HopState.DONE, f"Committed at {moment(seen.details.task.created_at)}."),
        outbox,
        _broker(seen, outbox.state),
        _lease(seen),
        _effect(seen),
        _receipt(seen),
    ]


def custody_of_unsaved(receipt: Receipt, now: datetime) -> list[Hop]:
    """Return the six hops of a task that is in the receipt log only, or was rejected."""
    hops = ("Outbox", "Broker", "Lease", "Effect")
    if receipt.level is Level.REJECTED:
        never = [Hop(name, HopState.UNNEEDED, "The task was rejected.") for name in hops]
        return [
            Hop("Row", HopState.UNNEEDED, "The task can never be saved."),
            *never,
            Hop("Receipt", HopState.DONE, f"Rejected{_number_of(receipt)}."),
        ]
    late = now - receipt.promised_by
    if late > timedelta():
        text = f"It should have been saved {duration(late)} ago, and waits in the receipt log: does a saver run?"
        row = Hop("Row", HopState.MISSING, text)
    else:
        row = Hop("Row", HopState.NOW, f"It waits in the receipt log to be saved by {moment(receipt.promised_by)}.")
    later = [Hop(name, HopState.LATER, "After it is saved.") for name in hops]
    return [row, *later, Hop("Receipt", HopState.LATER, f"Accepted at {moment(receipt.accepted_at)}.")]


def _outbox(seen: Evidence) -> Hop:
    task = seen.details.task
    if not _is_open(seen):
        last = f"Its last wake-up was written at {moment(task.last_wakeup_at)}." if task.last_wakeup_at else ""
        return Hop("Outbox", HopState.DONE if last else HopState.UNNEEDED, last or "It needs no wake-up any more.")
    if seen.details.wakeups:
        return _unsent(seen, seen.details.wakeups[-1])
    latest = max((each for each in seen.events if each.is_wakeup), key=lambda each: each.id, default=None)
    if latest is not None and latest.status == EventStatus.DEAD:
        return Hop("Outbox", HopState.MISSING, f"Its wake-up {latest.id} is dead: it was given up.")
    if task.last_wakeup_at is None:
        return Hop("Outbox", HopState.LATER, "It gets a wake-up when it may run.")
    return Hop("Outbox", HopState.DONE, f"The wake-up of {moment(task.last_wakeup_at)} has left the outbox.")


def _unsent(seen: Evidence, wakeup: UnsentWakeup) -> Hop:
    """Return the hop of a wake-up that is in the outbox. It is missing in the broker if it should have left."""
    now = seen.details.now
    due_at = wakeup.next_retry_at or wakeup.created_at
    if due_at > now and not wakeup.attempt_count:
        return Hop("Outbox", HopState.NOW, f"Its wake-up {wakeup.id} waits until {moment(due_at)}.")
    if seen.details.pause:
        return Hop("Outbox", HopState.NOW, f"Its wake-up {wakeup.id} waits until the queue is resumed.")
    tries = f"{wakeup.attempt_count} failed attempt{'' if wakeup.attempt_count == 1 else 's'}"
    text = f"Its wake-up {wakeup.id} waits to be published{f', after {tries}' if wakeup.attempt_count else ''}"
    if seen.is_unreachable:
        return Hop("Outbox", HopState.MISSING, f"{text}: the broker gives no answer.")
    if now - due_at > seen.grace:
        late = duration(now - due_at)
        return Hop("Outbox", HopState.MISSING, f"{text} and is due since {late}: does beat or `manage.py relay` run?")
    return Hop("Outbox", HopState.NOW, f"{text}.")


def _broker(seen: Evidence, outbox: HopState) -> Hop:
    task, now = seen.details.task, seen.details.now
    if not _is_open(seen):
        has_run = any(each.to_status == TaskStatus.RUNNING for each in seen.details.transitions)
        if has_run:
            return Hop("Broker", HopState.DONE, "A worker has taken the message.")
        return Hop("Broker", HopState.UNNEEDED, "No message is needed any more.")
    is_due = task.next_retry_at is None or task.next_retry_at <= now
    if outbox is not HopState.DONE or not is_due:
        return Hop("Broker", HopState.LATER, "The message is sent when the outbox publishes the wake-up.")
    if seen.details.blocker or seen.details.pause or seen.details.limit:
        return Hop("Broker", HopState.LATER, "It is woken again when it may run.")
    return _in_broker(seen)


def _in_broker(seen: Evidence) -> Hop:
    """Return where the message is that was sent."""
    task, now = seen.details.task, seen.details.now
    if seen.waiting is None:
        return Hop("Broker", HopState.UNKNOWN, "The broker does not answer, so the message cannot be seen.")
    if seen.waiting:
        place = f"one of {number(seen.waiting)} messages" if seen.waiting > 1 else "the only message"
        return Hop("Broker", HopState.NOW, f"Its message is {place} in the queue.")
    if now - (task.last_wakeup_at or task.created_at) > seen.grace:
        return Hop("Broker", HopState.MISSING, "The queue is empty: the message is lost, and will be sent again.")
    return Hop("Broker", HopState.NOW, "The queue is empty: a worker has just taken the message.")


def _lease(seen: Evidence) -> Hop:
    task, lease = seen.details.task, seen.details.lease
    if task.status == TaskStatus.RUNNING:
        if lease is None:
            return Hop("Lease", HopState.MISSING, "It runs without a lease: its worker was lost.")
        if lease.lease_until <= seen.details.now:
            late = duration(seen.details.now - lease.lease_until)
            return Hop("Lease", HopState.MISSING, f"It expired {late} ago: its worker is lost.")
        holder = f"{lease.holder} holds it" if lease.holder else "A worker holds it"
        return Hop("Lease", HopState.NOW, f"{holder} until {moment(lease.lease_until)}.")
    runs = sum(each.to_status == TaskStatus.RUNNING for each in seen.details.transitions)
    number_of = f"more than {number(runs)}" if seen.details.older_transitions else number(runs)
    if task.status not in FINAL:
        before = f" It had {number_of} before." if runs else ""
        return Hop("Lease", HopState.LATER, f"No worker has it.{before}")
    if not runs:
        return Hop("Lease", HopState.UNNEEDED, "No worker has had it.")
    return Hop("Lease", HopState.DONE, f"Returned; it had {number_of} lease{'' if runs == 1 else 's'}.")


def _effect(seen: Evidence) -> Hop:
    status = seen.details.task.status
    if not seen.sinks:
        if status == TaskStatus.SUCCEEDED:
            return Hop("Effect", HopState.DONE, f"{NO_SINK} {COMMITTED}")
        if status in FINAL:
            return Hop("Effect", HopState.UNNEEDED, f"{NO_SINK} {ROLLED_BACK}")
        return Hop("Effect", HopState.LATER, NO_SINK)
    return _in_sinks(seen)


def _in_sinks(seen: Evidence) -> Hop:
    status = seen.details.task.status
    if None in seen.effects:
        return Hop("Effect", HopState.UNKNOWN, "A sink has not answered so far.")
    found = [each for each in seen.effects if each is not None]
    words = ", ".join(dict.fromkeys(f"{each.sink}: {each.state}" for each in found))
    if any(each.state is EffectState.UNKNOWN for each in found):
        return Hop("Effect", HopState.MISSING, f"{words}.")
    if any(each.state is EffectState.COMMITTED for each in found) or status == TaskStatus.SUCCEEDED:
        return Hop("Effect", HopState.DONE, f"{words}.")
    if status == TaskStatus.RUNNING:
        return Hop("Effect", HopState.NOW, f"{words} so far.")
    return Hop("Effect", HopState.UNNEEDED if status in FINAL else HopState.LATER, f"{words}.")


def _receipt(seen: Evidence) -> Hop:
    told = [each for each in seen.events if not each.is_wakeup]
    dead = [each for each in told if each.status == EventStatus.DEAD]
    notify = seen.details.task.notify
    if dead:
        return Hop("Receipt", HopState.MISSING, f"The event {dead[-1].id} for {dead[-1].destination} is dead.")
    words = []
    if seen.receipt is not None:
        what = "Saved" if seen.receipt.level is Level.SAVED else "Rejected"
        words.append(f"{what}{_number_of(seen.receipt)}.")
    if notify is not None:
        if seen.details.task.status not in FINAL:
            words.append(f"{notify} will be told how it ends.")
            return Hop("Receipt", HopState.LATER, " ".join(words))
        if not told:
            words.append(f"The event for {notify} is not among the latest ones: it may have been pruned.")
            return Hop("Receipt", HopState.UNKNOWN, " ".join(words))
        waits = told[-1].status != EventStatus.SENT
        words.append(f"{notify} {'is to be told' if waits else 'was told'} how it ended.")
        return Hop("Receipt", HopState.NOW if waits else HopState.DONE, " ".join(words))
    if words:
        return Hop("Receipt", HopState.DONE, words[0])
    return Hop("Receipt", HopState.UNNEEDED, "None was requested.")


def _number_of(receipt: Receipt) -> str:
    at = f" at {moment(receipt.saved_at)}" if receipt.saved_at else ""
    return f" as number {receipt.ledger_seq}{at}" if receipt.ledger_seq is not None else at


def _is_open(seen: Evidence) -> bool:
    return seen.details.task.status in (TaskStatus.QUEUED, TaskStatus.RETRYING)
