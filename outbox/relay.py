"""The relay: claim due events, publish them, and settle them. Any number of relays may run at once.

One `tick` publishes due events until none is left or its time is over. Destinations are drained side by side, so that a
slow one does not delay the others. No transaction is open while a publisher works. If the relay dies after a claim, the
lease expires and another relay claims the events again: an event that was already published is then published twice; no
event is lost.

    claim (committed) ─► look for duplicates ─► publish ─► ack | retry | dead (one transaction) ─► claim …

A wake-up that died because the broker was unreachable is requeued when the broker answers again. If no other event is
left to find that out, the dead wake-up itself is the probe: it is published and stays DEAD until there is an answer.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Engine

from failpoint import failpoint
from models.driver_values import UnparsableJson
from models.engine import make_engine
from outbox.audit import DATABASE_ERRORS, DatabaseErrors
from outbox.circuit import Circuits
from outbox.destinations import CELERY, Destination, OpenDestinations, UnknownDestination
from outbox.lease import NO_FLOOR, ClaimedEvent, claim_outbox
from outbox.lease_statements import DESTINATIONS
from outbox.paused_queues import PausedQueues
from outbox.publishers.contract import DestinationDown, Failed, NotTried, Publisher, Result
from outbox.settle import Settlement
from settings import Settings
from tracing import publishing

logger = logging.getLogger(__name__)

LOOK_BELOW_SECONDS: Final = 1.0
AT_ONCE: Final = 8  # destinations that are drained in parallel
UNREADABLE: Final = "The payload or the headers cannot be read: a number is too long, or it is nested too deeply."


@dataclass(frozen=True, slots=True)
class Ticked:
    """The counts of one tick, and the wait until the next one."""

    sent: int = 0
    failed: int = 0
    dead: int = 0
    next_in_seconds: float = 0.0

    def __add__(self, other: Ticked) -> Ticked:
        return Ticked(self.sent + other.sent, self.failed + other.failed, self.dead + other.dead)


class Relay:
    """One relay of a process. It keeps its circuits and open destinations between ticks."""

    def __init__(self, engine: Engine, settings: Settings, *, only: str | None = None) -> None:
        self.engine = engine
        self.settings = settings
        self._only = only  # the one destination that it drains; None: all
        self.worker_id = f"{socket.gethostname()}:{os.getpid()}"
        self.circuits = Circuits()
        self._destinations = OpenDestinations(settings)
        self._wakeups = [CELERY + queue for queue in (*settings.ingest_queues, settings.ingest_dlq_queue) if queue]
        self._paused_queues = PausedQueues()
        self._database_errors = DatabaseErrors(self.worker_id)

    @classmethod
    def of(cls, settings: Settings, *, only: str | None = None) -> Relay:
        """Return a relay with its own connections, whose statements have a time limit."""
        engine = make_engine(settings.database_url, application_name="celeriac-relay", statement_timeout_seconds=30)
        return cls(engine, settings, only=only)

    def tick(self, budget_seconds: float = 10.0) -> Ticked:
        """Publish until nothing is due or the time is over.

        A database error ends the tick. It is logged and counted now, and audited by the next tick that succeeds.
        """
        deadline = time.monotonic() + budget_seconds
        try:
            self._database_errors.write(self.engine)
            done = self._drain_all(deadline)
        except DATABASE_ERRORS as error:
            self._database_errors.note(error)
            done = Ticked()
        has_more = done.sent > 0 and time.monotonic() >= deadline
        interval = self.settings.outbox_publish_interval_ms / 1000
        return Ticked(done.sent, done.failed, done.dead, 0.0 if has_more else interval)

    def close(self) -> None:
        self._destinations.close()
        self.engine.dispose()

    def _drain_all(self, deadline: float) -> Ticked:
        if self._only is not None:
            return self._drain(self._only, has_dead=False, deadline=deadline)
        with self.engine.begin() as connection:
            found = connection.execute(DESTINATIONS, {"wakeups": self._wakeups}).all()
        allowed = [row for row in found if self.circuits.allows(row.destination) != 0]
        if len(allowed) <= 1:
            return sum((self._drain(row.destination, row.has_dead, deadline) for row in allowed), Ticked())
        with ThreadPoolExecutor(min(len(allowed), AT_ONCE), thread_name_prefix="relay") as pool:
            return sum(pool.map(lambda row: self._drain(row.destination, row.has_dead, deadline), allowed), Ticked())

    def _drain(self, name: str, has_dead: bool, deadline: float) -> Ticked:
        """Publish the due events of one destination. `has_dead`: some wake-ups died because it was unreachable.

        Claims read the index upwards from a floor, so that they pass the dead entries of sent events once. They start
        at the bottom again if an event there may be due again, or may have become visible late: ids do not become
        visible in their order.
        """
        done, floor, looked_below_at, unfinished = Ticked(), NO_FLOOR, time.monotonic(), False
        lease_seconds = self.settings.outbox_lease_seconds
        with self.engine.connect() as connection:
            settlement = Settlement(connection, self.settings, self.worker_id)
            while time.monotonic() < deadline:
                allowed = self.circuits.allows(name)
                limit = self.settings.outbox_publish_batch_size if allowed is None else allowed
                if limit == 0:
                    break
                claimed_at = time.monotonic()
                events = claim_outbox(connection, self.worker_id, limit, lease_seconds, only=name, after=floor)
                if events:
                    failpoint("relay.after_claim")
                    floor = floor.above(events)
                    if self._paused_queues.is_paused(connection, name):
                        settlement.drop_paused(events)
                        continue
                    ticked = self._publish(name, events, settlement, claimed_at)
                    unfinished |= ticked.sent < len(events) or any(event.ordering_key is not None for event in events)
                    unfinished |= allowed is not None  # the destination answers again: events below are due, too
                    done += ticked
                elif floor != NO_FLOOR and (unfinished or time.monotonic() - looked_below_at > LOOK_BELOW_SECONDS):
                    floor, looked_below_at, unfinished = NO_FLOOR, time.monotonic(), False
                elif has_dead and self._revive(name, settlement):
                    floor, has_dead = NO_FLOOR, False
                else:
                    break
        return done

    def _publish(self, name: str, events: Sequence[ClaimedEvent], settlement: Settlement, claimed_at: float) -> Ticked:
        try:
            destination = self._destinations.open(name)
        except UnknownDestination as error:
            return Ticked(dead=settlement.mark_dead(str(error), events))
        if unreadable := [event for event in events if _is_unreadable(event)]:
            readable = [event for event in events if not _is_unreadable(event)]
            died = settlement.mark_dead(UNREADABLE, unreadable)
            return Ticked(dead=died) + self._publish(name, readable, settlement, claimed_at)
        if not destination.dedup:
            return self._publish_fresh(name, destination, events, settlement, claimed_at)
        with settlement.without_duplicates(events) as fresh:
            return self._publish_fresh(name, destination, fresh, settlement, claimed_at)

    def _publish_fresh(
        self,
        name: str,
        destination: Destination,
        events: Sequence[ClaimedEvent],
        settlement: Settlement,
        claimed_at: float,
    ) -> Ticked:
        fresh = settlement.renew(events, claimed_at, always=destination.publisher.is_slow)
        if not fresh:
            return Ticked()
        started_at = time.monotonic()
        try:
            results = _results(name, destination.publisher, fresh)
        except DestinationDown as error:
            self._on_unreachable(name, error)
            seconds = time.monotonic() - started_at
            return Ticked(*settlement.charge_probe(fresh, error.message, seconds=seconds))
        seconds = time.monotonic() - started_at
        failpoint("relay.after_publish")
        if self.circuits.answered(name):
            logger.warning(
                "Destination %s answers again.", name, extra={"event": "destination_up", "destination": name}
            )
            settlement.resume(name, requeue_dead=destination.is_wakeup)
        held = {event.id for event in settlement.renew(fresh, claimed_at)}
        outcomes = [(event, result) for event, result in zip(fresh, results, strict=True) if event.id in held]
        return Ticked(*settlement.settle(outcomes, seconds=seconds, audit_as_batch=destination.is_wakeup))

    def _revive(self, name: str, settlement: Settlement) -> bool:
        """Requeue the wake-ups that died because their queue was unreachable, if it answers again.

        One of them is published to find out, and once more when it is claimed: a repeated wake-up is harmless.
        """
        probe = settlement.find_dead_probe(name)
        if probe is None:
            return False
        try:
            (result,) = _results(name, self._destinations.open(name).publisher, [probe])
        except DestinationDown as error:
            self._on_unreachable(name, error)
            settlement.audit_dead_probe(probe, error.message)
            return False
        if isinstance(result, NotTried):
            return False
        self.circuits.answered(name)
        logger.warning(
            "Destination %s answers again. Its dead wake-ups are requeued.",
            name,
            extra={"event": "destination_up", "destination": name},
        )
        settlement.resume(name, requeue_dead=True)
        return True

    def _on_unreachable(self, name: str, error: DestinationDown) -> None:
        wait = self.circuits.failed(name)
        logger.warning(
            "Destination %s is unreachable, next try in %.0f s: %s",
            name,
            wait,
            error.message,
            extra={"event": "destination_down", "destination": name},
        )


def _results(name: str, publisher: Publisher, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
    try:
        with publishing(name, events):
            return publisher.publish(events)
    except DestinationDown:
        raise
    except Exception as error:  # a bug of the publisher; without a counted attempt the event would return for ever
        logger.exception(
            "The publisher of %s raised an unexpected error.",
            name,
            extra={"event": "publisher_failed", "destination": name},
        )
        return [Failed(f"{type(error).__name__}: {error}")] * len(events)


def _is_unreadable(event: ClaimedEvent) -> bool:
    """Return whether the driver could not decode the event; publishing it would send the raw text."""
    return isinstance(event.payload, UnparsableJson) or isinstance(event.headers, UnparsableJson)
