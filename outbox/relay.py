"""The relay: claims due events, publishes them, and writes down what became of them. Any number may run at once.

One `tick` drains what is due until nothing is left or its time is over, each destination by itself and several at once,
so that a slow one holds up nobody. No transaction is open while a publisher works. If the relay dies after a claim, the
lease runs out and another one claims the events again: what was published is then published twice, never not at all.

    claim (committed) ─► look for duplicates ─► publish ─► ack | retry | dead (one transaction) ─► claim …
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
from sqlalchemy.exc import DBAPIError

from failpoint import failpoint
from models.driver_values import Unreadable
from models.engine import make_engine
from models.errors import Unreachable
from outbox import audit
from outbox.audit import FlushCode
from outbox.circuit import Circuits
from outbox.destinations import Destination, UnknownDestination, open_destination
from outbox.lease import NO_FLOOR, ClaimedEvent, claim_outbox, release_lease_many
from outbox.lease_statements import DESTINATIONS
from outbox.publishers.contract import DestinationDown, Failed
from outbox.settle import Flush
from settings import Settings

logger = logging.getLogger(__name__)

STATEMENT_TIMEOUT_SECONDS: Final = 30.0
LOOK_BELOW_SECONDS: Final = 1.0
AT_ONCE: Final = 8  # destinations that are drained in parallel
UNREADABLE: Final = "The payload or the headers cannot be read: a number is too long, or it is nested too deeply."


@dataclass(frozen=True, slots=True)
class Ticked:
    """What one tick did, and when to come back."""

    sent: int = 0
    failed: int = 0
    dead: int = 0
    next_in_seconds: float = 0.0

    def __add__(self, other: Ticked) -> Ticked:
        return Ticked(self.sent + other.sent, self.failed + other.failed, self.dead + other.dead)


class Relay:
    """One relay of one process; its circuits and open destinations outlive a tick."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.worker_id = f"{socket.gethostname()}:{os.getpid()}"
        self.circuits = Circuits()
        self._destinations: dict[str, Destination] = {}
        self._unwritten: dict[FlushCode, str] = {}

    @classmethod
    def of(cls, settings: Settings) -> Relay:
        """A relay with connections of its own, whose statements end after a while (P22)."""
        engine = make_engine(
            settings.database_url,
            application_name="celeriac-relay",
            statement_timeout_seconds=STATEMENT_TIMEOUT_SECONDS,
        )
        return cls(engine, settings)

    def tick(self, budget_seconds: float = 10.0) -> Ticked:
        """Drain until nothing is due or the time is over. A database that is away is counted, and audited later."""
        deadline = time.monotonic() + budget_seconds
        try:
            self._write_what_could_not_be_written()
            done = self._drain_all(deadline)
        except (DBAPIError, Unreachable) as error:
            self._remember(error)
            done = Ticked()
        more = done.sent > 0 and time.monotonic() >= deadline
        interval = self.settings.outbox_publish_interval_ms / 1000
        return Ticked(done.sent, done.failed, done.dead, 0.0 if more else interval)

    def close(self) -> None:
        for destination in self._destinations.values():
            destination.publisher.close()
        self._destinations.clear()
        self.engine.dispose()

    def _drain_all(self, deadline: float) -> Ticked:
        with self.engine.begin() as connection:
            waiting = connection.execute(DESTINATIONS).scalars().all()
        names = [name for name in waiting if self.circuits.allows(name) != 0]
        if len(names) <= 1:
            return sum((self._drain(name, deadline) for name in names), Ticked())
        with ThreadPoolExecutor(min(len(names), AT_ONCE), thread_name_prefix="relay") as pool:
            return sum(pool.map(lambda name: self._drain(name, deadline), names), Ticked())

    def _drain(self, name: str, deadline: float) -> Ticked:
        """Upwards from a floor, so that dead index entries are walked over once; what is below it is looked at again
        if something there may be due again, or may have become visible since: ids do not in their order.
        """
        done, floor, looked_below_at, unfinished = Ticked(), NO_FLOOR, time.monotonic(), False
        with self.engine.connect() as connection:
            flush = Flush(connection, self.settings, self.worker_id)
            while time.monotonic() < deadline:
                allowed = self.circuits.allows(name)
                limit = self.settings.outbox_publish_batch_size if allowed is None else allowed
                if limit == 0:
                    break
                claimed_at = time.monotonic()
                events = claim_outbox(
                    connection, self.worker_id, limit, self.settings.outbox_lease_seconds, only=[name], after=floor
                )
                if events:
                    failpoint("relay.after_claim")
                    floor = floor.above(events)
                    ticked = self._publish(name, events, flush, claimed_at)
                    unfinished |= ticked.sent < len(events) or any(event.ordering_key is not None for event in events)
                    done += ticked
                elif floor != NO_FLOOR and (unfinished or time.monotonic() - looked_below_at > LOOK_BELOW_SECONDS):
                    floor, looked_below_at, unfinished = NO_FLOOR, time.monotonic(), False
                else:
                    break
        return done

    def _publish(self, name: str, events: Sequence[ClaimedEvent], flush: Flush, claimed_at: float) -> Ticked:
        try:
            destination = self._destination(name)
        except UnknownDestination as error:
            return Ticked(dead=flush.dead(dict.fromkeys((event.id for event in events), str(error)), events))
        if unreadable := [event for event in events if _is_unreadable(event)]:
            buried = flush.dead(dict.fromkeys((event.id for event in unreadable), UNREADABLE), unreadable)
            readable = [event for event in events if not _is_unreadable(event)]
            return Ticked(dead=buried) + self._publish(name, readable, flush, claimed_at)
        fresh = flush.drop_duplicates(events) if destination.dedup else list(events)
        fresh = flush.renew(fresh, claimed_at, always=destination.publisher.is_slow)
        if not fresh:
            return Ticked()
        started_at = time.monotonic()
        try:
            results = destination.publisher.publish(fresh)
        except DestinationDown as error:
            return self._nobody_answered(name, destination, fresh, flush, error)
        except Exception as error:  # against the contract; without an attempt it would come back for ever
            logger.exception("the publisher of %s is broken", name)
            results = [Failed(f"{type(error).__name__}: {error}")] * len(fresh)
        failpoint("relay.after_publish")
        if self.circuits.answered(name):
            logger.warning("%s answers again", name)
            flush.hasten(name)
        fresh_ids = {event.id for event in flush.renew(fresh, claimed_at)}
        kept = [(event, result) for event, result in zip(fresh, results, strict=True) if event.id in fresh_ids]
        settled = flush.settle(kept, seconds=time.monotonic() - started_at, quietly=destination.is_wakeup)
        return Ticked(*settled)

    def _nobody_answered(
        self, name: str, destination: Destination, events: Sequence[ClaimedEvent], flush: Flush, error: DestinationDown
    ) -> Ticked:
        """Only the probe is charged; the others are given back as they were. A wake-up never dies of it."""
        wait = self.circuits.failed(name)
        logger.warning("%s does not answer, the next try is in %.0f s: %s", name, wait, error.message)
        probe, *others = events
        release_lease_many(
            flush.connection, [event.id for event in others], self.worker_id, lease_token=probe.lease_token
        )
        return Ticked(*flush.charge_probe(probe, error.message, may_die=not destination.is_wakeup))

    def _destination(self, name: str) -> Destination:
        if name not in self._destinations:
            self._destinations[name] = open_destination(name, self.settings)
        return self._destinations[name]

    def _remember(self, error: DBAPIError | Unreachable) -> None:
        """P22: logged and counted at once, written when the database is back."""
        code = audit.code_of(error) if isinstance(error, DBAPIError) else FlushCode.DB_ERROR
        audit.count(code, 1)
        sentence = str(error).partition("\n")[0]
        logger.error("%s: %s", code, sentence)
        self._unwritten[code] = sentence

    def _write_what_could_not_be_written(self) -> None:
        if self._unwritten:
            with self.engine.begin() as connection:
                for code, sentence in self._unwritten.items():
                    audit.write(connection, code, {None: sentence}, worker_id=self.worker_id)
            self._unwritten.clear()


def _is_unreadable(event: ClaimedEvent) -> bool:
    """A publisher would take it for text and send that."""
    return isinstance(event.payload, Unreadable) or isinstance(event.headers, Unreadable)
