"""Report what becomes of tasks, for Flower: from the process that runs them to the main process of its worker.

Celery knows only that `tasks.ingest` ran. So the processes of a worker report the tasks of the ledger themselves, as
Celery's events: `task-received` and `task-started` at the claim, and one more when the task is settled. The worker's
main process sends them to the broker (`event_sender.py`). Only it knows whether Flower has switched events on, and
tells its children through shared memory. While events are off, a claim costs one look at that memory, and nothing is
written.

    Succeeded                       task-succeeded   SUCCESS, with the seconds in the handler
    Retry                           task-retried     RETRY, with the error
    Dead                            task-failed      FAILURE, with the error
    Snoozed, Isolated, Released     task-retried     RETRY, with the reason
    Discarded                       task-revoked     REVOKED

Reporting never waits. The main process grants a number of tasks per second: a task that was granted is followed from
its claim to its end, so none is shown as started for ever. Of the others only failures are reported. If the socket is
full, failures are kept and reported with the next ones; everything else is dropped. The ledger has it all.

An event has no payload and no result: they may be secret.
"""

from __future__ import annotations

import json
import mmap
import socket
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from tasks.core.outcomes import Dead, Discarded, Isolated, Outcome, Released, Retry, Snoozed, Succeeded
from tasks.core.task import Task

Event = dict[str, Any]
NOTHING: Final[frozenset[Task]] = frozenset()
DATAGRAM_EVENTS: Final = 50  # with error sentences of 500 characters they fit into the buffer of a socket
DATAGRAM_BYTES: Final = 256 * 1024  # more than any of them has
KEPT_DATAGRAMS: Final = 100  # with failures, in each process, while the socket is full

_KINDS: Final[dict[type[Outcome], str]] = {
    Succeeded: "task-succeeded",
    Retry: "task-retried",
    Dead: "task-failed",
    Snoozed: "task-retried",
    Isolated: "task-retried",
    Released: "task-retried",
    Discarded: "task-revoked",
}


class EventChannel:
    """The shared memory and the socket between a worker and its children. Create it before the first fork.

    Children write without a lock. If two are granted the same tasks, a few too many are shown.
    """

    def __init__(self) -> None:
        self._shared = memoryview(mmap.mmap(-1, 16)).cast("q")  # is it on; how many more tasks are granted
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._kept: deque[bytes] = deque(maxlen=KEPT_DATAGRAMS)

    @property
    def is_on(self) -> bool:
        return bool(self._shared[0])

    def switch(self, *, on: bool) -> None:
        """Tell all children whether to report. Called in the main process."""
        self._shared[0] = on

    def grant(self, tasks: int, *, at_most: int) -> None:
        """Let the children follow so many more tasks, and not more than `at_most` with those left from before."""
        self._shared[1] = min(self._shared[1] + tasks, at_most)

    def take_grant(self, tasks: int) -> int:
        """Return how many of these tasks may be followed."""
        left = self._shared[1]
        taken = max(0, min(tasks, left))
        self._shared[1] = left - taken
        return taken

    def write(self, events: Sequence[Event], *, keep: bool) -> None:
        """Write events, without waiting. If the socket is full they are dropped, or kept for the next time."""
        self._send_kept()
        for start in range(0, len(events), DATAGRAM_EVENTS):
            datagram = json.dumps(events[start : start + DATAGRAM_EVENTS]).encode()
            if (self._kept or not self._send(datagram)) and keep:
                self._kept.append(datagram)

    def read(self) -> list[Event]:
        """Wait for events and return some. An empty list: `end` was called."""
        events: list[Event] = json.loads(self._reader.recv(DATAGRAM_BYTES))
        return events

    def end(self) -> None:
        """Let `read` return an empty list. Waits if the socket is full, until `read` has made room."""
        self._writer.send(b"[]")

    def _send_kept(self) -> None:
        """Send what was kept. Without a lock against other threads: a child may be forked while it is held."""
        while self._kept:
            with suppress(IndexError):
                datagram = self._kept.popleft()
                if not self._send(datagram):
                    self._kept.appendleft(datagram)
                    return

    def _send(self, datagram: bytes) -> bool:
        try:
            self._writer.send(datagram, socket.MSG_DONTWAIT)
        except OSError:  # the buffer is full, or the system has no memory for it
            return False
        return True


_channels: Final[list[EventChannel]] = []  # of this process, if it is a worker or one of its children


def use_channel(channel: EventChannel | None) -> None:
    """Report through this channel from now on; None: not at all."""
    _channels[:] = [channel] if channel else []


def report_started(tasks: Sequence[Task]) -> Collection[Task]:
    """Report that tasks were claimed; return those whose further life is to be reported."""
    followed: Collection[Task] = NOTHING
    for channel in _channels:
        if channel.is_on and (granted := channel.take_grant(len(tasks))):
            now = time.time()
            followed = frozenset(tasks[:granted])
            channel.write([event for task in tasks[:granted] for event in _start(task, now)], keep=False)
    return followed


def report_settled(
    settled: Mapping[Task, Outcome], followed: Collection[Task], seconds: Mapping[Task, float] | None = None
) -> None:
    """Report outcomes after their commit: those of followed tasks, and all failures."""
    for channel in _channels:
        if channel.is_on:
            now = time.time()
            failures = {task: outcome for task, outcome in settled.items() if isinstance(outcome, Retry | Dead)}
            others = ((task, outcome) for task, outcome in settled.items() if task in followed and task not in failures)
            channel.write(list(_ends(others, followed, seconds or {}, now)), keep=False)
            channel.write(list(_ends(failures.items(), followed, seconds or {}, now)), keep=True)


def _start(task: Task, at: float) -> Iterator[Event]:
    about = {"uuid": str(task.id), "name": task.type, "timestamp": at}
    yield {"type": "task-received", **about, "retries": task.attempt_count, "routing_key": task.queue}
    yield {"type": "task-started", **about}


def _ends(
    outcomes: Iterable[tuple[Task, Outcome]], followed: Collection[Task], seconds: Mapping[Task, float], at: float
) -> Iterator[Event]:
    for task, outcome in outcomes:
        spent = seconds.get(task)
        if task not in followed:
            yield from _start(task, at - (spent or 0.0))
        event = {"type": _KINDS[type(outcome)], "uuid": str(task.id), "name": task.type, "timestamp": at}
        match outcome:
            case Succeeded():
                event |= {"runtime": spent, "exception": None}  # Flower would go on showing the error of a retry
            case Retry(failure) | Dead(failure):
                event |= {"exception": failure.message, "runtime": spent}
            case Snoozed() | Isolated() | Released():
                event |= {"exception": f"{type(outcome).__name__}: {outcome.why}"}
            case Discarded():
                event |= {"exception": outcome.why, "terminated": False, "signum": None, "expired": False}
        yield event
