"""The submitter's own publishing, right after its commits (P18): one thread per process, with its own connections.

The first event goes at once; what comes in the milliseconds after that goes together next, the more at once the busier
this process is. The caller never waits: if the queue is full, the destination does not answer, or half of the born
lease is gone, the events are left to the relay.

All births of one process carry one random token. That is enough of a fence: a submitter never claims, so a row that
anybody has claimed since carries another token, for ever.
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

from sqlalchemy.exc import DBAPIError

import settings
from failpoint import failpoint
from models.engine import make_engine
from models.errors import CeleriacError
from models.one_per_process import OnePerProcess
from outbox.circuit import Circuits
from outbox.destinations import Destination, UnknownDestination, open_destination
from outbox.lease import ClaimedEvent, release_lease_many
from outbox.publishers.contract import DestinationDown, Result
from outbox.settle import Flush

logger = logging.getLogger(__name__)

QUEUE_LIMIT: Final = 1000  # hand-overs, each of one transaction
MOST_AT_ONCE: Final = 500
# A burst of single tasks becomes a few messages, and so a few batches (P7): the more at once, the longer we gather.
GATHER_SECONDS_EACH: Final = 0.002
GATHER_SECONDS: Final = 0.05
EXIT_PATIENCE_SECONDS: Final = 2.0
STATEMENT_TIMEOUT_SECONDS: Final = 5.0

HandOver = tuple[float, Sequence[ClaimedEvent], threading.Event | None]  # who waits until it was tried


class Submitter:
    """The publishing thread of this process. It starts with the first event and ends with the process."""

    def __init__(self, current: settings.Settings) -> None:
        self.settings = current
        self.worker_id = f"{socket.gethostname()}:{os.getpid()}:submitter"
        self.lease_token = uuid.uuid4()
        self.lease_seconds = current.outbox_submit_lease_seconds
        self.circuits = Circuits()
        # Of those that are written in C: a time limit that struck within `Queue.put` would leave it locked for ever.
        self._queue: queue.SimpleQueue[HandOver] = queue.SimpleQueue()
        self._destinations: dict[str, Destination] = {}
        self._left_to_the_relay: set[str] = set()
        self._is_closed = False
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None
        self._engine = make_engine(
            current.database_url,
            application_name="celeriac-submitter",
            statement_timeout_seconds=STATEMENT_TIMEOUT_SECONDS,
            pool_size=1,
        )

    def accepts(self, destination: str) -> bool:
        """Whether an event for it should be born leased to us."""
        return (
            destination not in self._left_to_the_relay
            and self.circuits.allows(destination) != 0
            and self._queue.qsize() < QUEUE_LIMIT
        )

    def hand_over(self, events: Sequence[ClaimedEvent]) -> None:
        """Their transaction has committed. Never waits and never raises."""
        if not events:
            return
        failpoint("submitter.after_commit")
        for name in {event.destination for event in events} - self._destinations.keys():
            with suppress(UnknownDestination):  # the relay buries it
                # here and not in the thread, which would import Celery while this process may be about to end
                self._destinations[name] = open_destination(name, self.settings)
        if self._queue.qsize() >= QUEUE_LIMIT:
            return  # their lease runs out, and a relay takes them
        self._queue.put((time.monotonic(), events, None))
        self._ensure_thread()

    def flush(self, seconds: float = EXIT_PATIENCE_SECONDS) -> bool:
        """Wait until everything handed over was tried. False when the time is over."""
        if self._thread is None or not self._thread.is_alive():
            return self._queue.empty()
        tried = threading.Event()
        self._queue.put((time.monotonic(), (), tried))
        return tried.wait(seconds)

    def close(self) -> None:
        """Publish what was handed over, then end the thread and its connections. Does not wait for that."""
        self._is_closed = True
        atexit.unregister(self.flush)
        if self._thread is None:
            self._engine.dispose()
        else:
            self._queue.put((time.monotonic(), (), None))

    def _ensure_thread(self) -> None:
        with self._start:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="outbox-submitter", daemon=True)
                self._thread.start()
                atexit.register(self.flush)

    def _run(self) -> None:
        gather_until = 0.0
        while not (self._is_closed and self._queue.empty()):
            taken = [self._queue.get()]
            time.sleep(max(0.0, gather_until - time.monotonic()))
            count = len(taken[0][1])
            while count < MOST_AT_ONCE:
                try:
                    taken.append(self._queue.get_nowait())
                except queue.Empty:
                    break
                count += len(taken[-1][1])
            try:
                self._publish_fresh(taken)
            except (DBAPIError, CeleriacError) as error:
                logger.warning("left to the relay: %s", str(error).partition("\n")[0])
            except Exception:
                logger.exception("left to the relay")
            finally:
                for *_, tried in taken:
                    if tried is not None:
                        tried.set()
            gather_until = time.monotonic() + min(GATHER_SECONDS, GATHER_SECONDS_EACH * (len(taken) - 1))
        for destination in self._destinations.values():
            destination.publisher.close()
        self._engine.dispose()

    def _publish_fresh(self, taken: Sequence[HandOver]) -> None:
        youngest = time.monotonic() - self.lease_seconds / 2
        groups: dict[str, list[ClaimedEvent]] = {}
        for handed_over_at, events, _ in taken:
            if handed_over_at > youngest:
                for event in events:
                    groups.setdefault(event.destination, []).append(event)
        for name, events in groups.items():
            if self.circuits.allows(name) != 0:
                self._publish(name, events)

    def _publish(self, name: str, events: Sequence[ClaimedEvent]) -> None:
        started_at = time.monotonic()
        results = self._results(name, events)
        with self._engine.connect() as connection:
            if results is None:
                ids = [event.id for event in events]
                release_lease_many(connection, ids, self.worker_id, lease_token=self.lease_token)
                connection.commit()
                return
            failpoint("submitter.after_publish")
            flush = Flush(connection, self.settings, self.worker_id)
            outcomes = list(zip(events, results, strict=True))
            is_wakeup = self._destinations[name].is_wakeup
            flush.settle(outcomes, seconds=time.monotonic() - started_at, quietly=is_wakeup)

    def _results(self, name: str, events: Sequence[ClaimedEvent]) -> Sequence[Result] | None:
        """None: the relay's business, which buries unknown destinations, looks for duplicates, and has time."""
        try:
            if name not in self._destinations:
                self._destinations[name] = open_destination(name, self.settings)
            destination = self._destinations[name]
            if destination.dedup or destination.publisher.is_slow:
                self._left_to_the_relay.add(name)
                return None
            results = destination.publisher.publish(events)
        except UnknownDestination:
            return None
        except DestinationDown:
            self.circuits.failed(name)
            return None
        self.circuits.answered(name)
        return results


submitter: Final = OnePerProcess(Submitter)
