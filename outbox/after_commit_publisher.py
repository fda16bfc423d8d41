"""Publish events right after the commit that added them: one thread per process, with its own connections.

The first event is published at once. Events that arrive in the following milliseconds are published together; the
busier the process, the longer the thread gathers. The caller never waits: if the queue is full, the destination is
unreachable or half of the lease is over, the relay publishes the events. See docs/protocol.md, Leased at insert.
Errors of the database are counted at once, and audited when it answers again; see Codes there.

All events that a process leases at insert carry one random token. This is a sufficient fence: the process never claims,
so a row that was claimed since then carries another token and never this one again.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import settings
from failpoint import failpoint
from models.engine import make_engine
from models.process_singleton import OnePerProcess
from outbox.audit import DATABASE_ERRORS, DatabaseErrors
from outbox.circuit import Circuits
from outbox.destinations import OpenDestinations, UnknownDestination
from outbox.lease import ClaimedEvent
from outbox.publishers.contract import DestinationDown, Result
from outbox.settle import Settlement
from tally.counts import count
from tally.subjects import Subject
from tracing import publishing

logger = logging.getLogger(__name__)

QUEUE_LIMIT: Final = 1000  # transactions
MOST_AT_ONCE: Final = 500  # events
# Gathering turns a burst of single tasks into a few messages, and so into a few batches.
GATHER_SECONDS_EACH: Final = 0.002
GATHER_SECONDS: Final = 0.05
EXIT_PATIENCE_SECONDS: Final = 2.0
AUDIT_RETRY_SECONDS: Final = 5.0  # between two attempts to audit database errors while no event arrives

# When the events of one transaction were handed over, the events, and what to set after they were tried.
HandOver = tuple[float, Sequence[ClaimedEvent], threading.Event | None]


class AfterCommitPublisher:
    """The publishing thread of a process. It starts with the first event and ends with the process."""

    def __init__(self, current: settings.Settings) -> None:
        self.settings = current
        self.worker_id = f"{socket.gethostname()}:{os.getpid()}:after-commit"
        self.lease_token = uuid.uuid4()
        self.lease_seconds = current.outbox_submit_lease_seconds
        self.circuits = Circuits()
        # SimpleQueue is written in C: a time limit that struck inside `Queue.put` would leave it locked for ever.
        self._queue: queue.SimpleQueue[HandOver] = queue.SimpleQueue()
        self._destinations = OpenDestinations(current)
        self._left_to_relay: set[str] = set()
        self._database_errors = DatabaseErrors(self.worker_id)
        self._is_closed = False
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None
        name = "celeriac-after-commit"
        self._engine = make_engine(
            current.database_url, application_name=name, statement_timeout_seconds=5, pool_size=1
        )

    def accepts(self, destination: str) -> bool:
        """Return whether an event for this destination should be leased to this process at insert."""
        is_open = destination not in self._left_to_relay and self.circuits.allows(destination) != 0
        return is_open and self._queue.qsize() < QUEUE_LIMIT

    def hand_over(self, events: Sequence[ClaimedEvent]) -> None:
        """Publish events whose transaction has committed. Never waits and never raises."""
        if not events:
            return
        failpoint("after_commit.handed_over")
        for name in {event.destination for event in events}:
            with suppress(UnknownDestination):  # the relay marks its events as DEAD
                # Open it here: the thread would import Celery while this process may be about to end.
                self._destinations.open(name)
        if self._queue.qsize() < QUEUE_LIMIT:  # otherwise the leases expire, and a relay claims the events
            self._queue.put((time.monotonic(), events, None))
            self._ensure_thread()

    def wait_until_idle(self, seconds: float = EXIT_PATIENCE_SECONDS) -> bool:
        """Wait until every event handed over so far was tried. Return False if the time is over first."""
        if self._queue.empty() and (self._thread is None or not self._thread.is_alive()):
            return True
        self._ensure_thread()
        tried = threading.Event()
        self._queue.put((time.monotonic(), (), tried))
        return tried.wait(seconds)

    def close(self) -> None:
        """Let the thread publish what was handed over, then close its connections. Does not wait for that."""
        self._is_closed = True
        atexit.unregister(self.wait_until_idle)
        if self._thread is None:
            self._engine.dispose()
        else:
            self._queue.put((time.monotonic(), (), None))

    def _ensure_thread(self) -> None:
        """Start the thread, also again if an exception such as SystemExit has ended it."""
        with self._start:
            if self._thread is None:
                atexit.register(self.wait_until_idle)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="outbox-after-commit", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        gather_until = 0.0
        while not (self._is_closed and self._queue.empty()):
            try:
                taken = [self._queue.get(timeout=AUDIT_RETRY_SECONDS if self._database_errors.are_unwritten else None)]
            except queue.Empty:
                self._audit_database_errors()
                continue
            time.sleep(max(0.0, gather_until - time.monotonic()))
            count = len(taken[0][1])
            with suppress(queue.Empty):
                while count < MOST_AT_ONCE:
                    taken.append(self._queue.get_nowait())
                    count += len(taken[-1][1])
            try:
                self._publish_fresh(taken)
                self._audit_database_errors()
            except DATABASE_ERRORS as error:
                self._database_errors.note(error)
            except Exception:
                logger.exception("The relay will publish these events.", extra={"event": "events_left_to_relay"})
            finally:
                for *_, tried in taken:
                    if tried is not None:
                        tried.set()
            gather_until = time.monotonic() + min(GATHER_SECONDS, GATHER_SECONDS_EACH * (len(taken) - 1))
        self._destinations.close()
        self._engine.dispose()

    def _audit_database_errors(self) -> None:
        with suppress(*DATABASE_ERRORS):  # the database still does not answer; the errors are kept
            self._database_errors.write(self._engine)

    def _publish_fresh(self, taken: Sequence[HandOver]) -> None:
        """Publish the events, by destination, whose lease is not half over."""
        oldest = time.monotonic() - self.lease_seconds / 2
        groups: dict[str, list[ClaimedEvent]] = {}
        for handed_over_at, events, _ in taken:
            for event in events if handed_over_at > oldest else ():
                groups.setdefault(event.destination, []).append(event)
        for name, group in groups.items():
            if self.circuits.allows(name) != 0:
                self._publish(name, group)

    def _publish(self, name: str, events: Sequence[ClaimedEvent]) -> None:
        results, seconds = self._results(name, events)
        with self._engine.connect() as connection:
            settlement = Settlement(connection, self.settings, self.worker_id)
            if results is None:
                settlement.release(events)
                return
            failpoint("after_commit.published")
            settlement.settle(
                list(zip(events, results, strict=True)),
                seconds=seconds,
                audit_as_batch=self._destinations.open(name).is_wakeup,
            )

    def _results(self, name: str, events: Sequence[ClaimedEvent]) -> tuple[Sequence[Result] | None, float]:
        """Publish, or return None if that is left to the relay. Return also the seconds of the publish.

        The relay handles unknown destinations, looks for duplicates, and has time for slow destinations.
        """
        try:
            destination = self._destinations.open(name)
            if destination.dedup or destination.publisher.is_slow:
                self._left_to_relay.add(name)
                return None, 0.0
            with publishing(name, events):
                started_at = time.monotonic()
                results = destination.publisher.publish(events)
                seconds = time.monotonic() - started_at
        except UnknownDestination:
            return None, 0.0
        except DestinationDown as error:
            wait = self.circuits.failed(name)
            logger.warning(
                "Destination %s is unreachable, next try in %.0f s: %s",
                name,
                wait,
                error.message,
                extra={"event": "destination_down", "destination": name},
            )
            count(Subject.PUBLISH, "failure", queue=name)
            return None, 0.0
        self.circuits.answered(name)
        return results, seconds


after_commit_publisher: Final = OnePerProcess(AfterCommitPublisher)
